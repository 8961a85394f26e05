// Options: one table row = TOML key, `section.key=value` override, help text, dump and checkpoint header.
//
// Each room owns a plain struct of settings and a function that adds its rows to the table; the table owns parsing,
// errors and printing, and never the values.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "base/check.h"

namespace cram {

/// A number with a unit: "24h", "5000steps", "3e9tokens". Units: steps, tokens, rows, s, m, h, d (times are kept in
/// the unit they were written in; `seconds()` converts).
struct Quantity {
  double value = 0;
  std::string unit;

  [[nodiscard]] bool is_time() const;
  [[nodiscard]] double seconds() const;  ///< requires is_time()
  [[nodiscard]] std::string text() const;
  bool operator==(const Quantity&) const = default;
};

/// Strict parsers: the whole text must be one finite number ("1e-3x" and "1,5" are errors). `what` names the value in
/// the message. Integers may be written 900_000 and 3e9 when that is whole.
[[nodiscard]] double parse_double(std::string_view text, std::string_view what);
[[nodiscard]] std::int64_t parse_integer(std::string_view text, std::string_view what);
[[nodiscard]] Quantity parse_quantity(std::string_view text, std::string_view what);

/// Shortest text that reads back to the same double.
[[nodiscard]] std::string format_double(double value);
/// 17 significant digits, the form of metrics and golden files; non-finite values become "null".
[[nodiscard]] std::string format_double17(double value);

/// The candidate with the smallest edit distance, or "" when there is none.
[[nodiscard]] std::string nearest_name(std::string_view name, const std::vector<std::string>& candidates);

/// One row. The setters return the row so that a declaration reads as one line.
class Option {
 public:
  using Target = std::variant<double*, std::int64_t*, bool*, std::string*, Quantity*>;

  Option(std::string key, Target target, std::string help);

  Option& range(double low, double high);                     ///< numbers: low <= value <= high
  Option& choices(std::vector<std::string> allowed);          ///< strings
  Option& units(std::vector<std::string> allowed);            ///< quantities; "time" stands for s, m, h, d
  Option& word(std::string name, std::int64_t value);         ///< integers: a name for a value outside the range
  Option& also_called(std::vector<std::string> other_names);  ///< only for "did you mean"
  Option& free_on_resume();                                   ///< may differ when a run is resumed
  Option& added_later();                                      ///< earlier programs had it not: they did its default

  [[nodiscard]] const std::string& key() const { return key_; }
  [[nodiscard]] const std::string& help() const { return help_; }
  [[nodiscard]] bool is_free_on_resume() const { return free_on_resume_; }
  [[nodiscard]] bool came_later() const { return added_later_; }
  [[nodiscard]] bool is_text() const;
  [[nodiscard]] bool knows_word(std::string_view text) const { return !word_.empty() && text == word_; }
  /// Where the value came from: "default", "FILE:LINE:COLUMN", "command line".
  [[nodiscard]] const std::string& origin() const { return origin_; }
  [[nodiscard]] bool is_set() const { return origin_ != "default"; }
  [[nodiscard]] const std::string& default_text() const { return default_text_; }
  [[nodiscard]] std::string value_text() const;  ///< as the override form would write it
  [[nodiscard]] std::string toml_text() const;   ///< value_text, quoted where TOML needs it
  [[nodiscard]] std::string kind() const;  ///< "number", "integer", "true|false", "a|b|c", "quantity (steps, time)"

  /// Parses and checks; throws Error(kUsage) naming origin, key, value and what is allowed; the target is unchanged
  /// then.
  void assign(std::string_view text, const std::string& origin);
  [[nodiscard]] const std::vector<std::string>& other_names() const { return other_names_; }
  [[nodiscard]] const Target& target() const { return target_; }

 private:
  std::string key_;
  Target target_;
  std::string help_;
  std::string default_text_;
  std::string origin_ = "default";
  double low_;
  double high_;
  std::vector<std::string> allowed_;
  std::vector<std::string> other_names_;
  std::string word_;  ///< stands for word_value_
  std::int64_t word_value_ = 0;
  [[nodiscard]] bool is_word() const;
  bool free_on_resume_ = false;
  bool added_later_ = false;
};

class OptionTable {
 public:
  OptionTable() = default;
  OptionTable(const OptionTable&) = delete;
  OptionTable& operator=(const OptionTable&) = delete;

  /// Adds a row; its default is the target's present value. The reference is valid until the next add.
  Option& add(std::string key, Option::Target target, std::string help);

  [[nodiscard]] const Option* find(std::string_view key) const;
  [[nodiscard]] const Option& at(std::string_view key) const;  ///< the key must exist (our own bug otherwise)
  [[nodiscard]] const std::vector<Option>& rows() const { return rows_; }

  /// Sets one value; an unknown key is Error(kUsage) with the nearest known key.
  void set(std::string_view key, std::string_view text, const std::string& origin);
  /// "section.key=value" from the command line.
  void apply_override(std::string_view assignment);
  /// A TOML file: refused when over 1 MiB or with a line over 4 KiB; errors carry file:line:column.
  void load_toml_file(const std::string& path);

  /// All values as a TOML document in table order, sections grouped; comments give the help text when asked.
  [[nodiscard]] std::string dump_toml(bool with_help = false) const;
  /// key -> value text.
  [[nodiscard]] std::map<std::string, std::string> values() const;
  /// The help text of all rows for `--help`.
  [[nodiscard]] std::string help_text() const;

 private:
  [[nodiscard]] Option* find_mutable(std::string_view key);
  std::vector<Option> rows_;
};

/// One value of a flattened TOML file.
struct TomlValue {
  std::string key;     ///< dotted
  std::string text;    ///< in override form
  std::string origin;  ///< "file:line:column"
  bool is_string = false;
  bool is_empty_section = false;  ///< `key` is the name of a section without entries
};
/// Reads and flattens; arrays and dates are refused by name. Throws Error(kUsage).
[[nodiscard]] std::vector<TomlValue> read_toml_file(const std::string& path);

}  // namespace cram
