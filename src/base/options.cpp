#include "base/options.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <limits>
#include <numeric>

namespace cram {
namespace {

constexpr std::size_t kLongestOverride = 4096;

std::string quoted(std::string_view text) {
  constexpr std::size_t kShown = 60;
  std::string shown;
  for (const char c : text.substr(0, kShown)) shown += (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) ? '?' : c;
  if (text.size() > kShown) shown += concat("... (", text.size(), " characters)");
  return "\"" + shown + "\"";
}

std::string joined(const std::vector<std::string>& parts, std::string_view separator) {
  std::string all;
  for (const std::string& part : parts) {
    if (!all.empty()) all += separator;
    all += part;
  }
  return all;
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// RFC 3629: no overlong forms, no surrogates, nothing above U+10FFFF.
bool is_utf8(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    const auto byte = [&](std::size_t k) { return static_cast<unsigned char>(text[k]); };
    const unsigned char first = byte(i);
    const std::size_t length = first < 0x80                    ? 1
                               : first >= 0xc2 && first < 0xe0 ? 2
                               : (first & 0xf0) == 0xe0        ? 3
                               : first >= 0xf0 && first < 0xf5 ? 4
                                                               : 0;
    if (length == 0 || i + length > text.size()) return false;
    for (std::size_t k = i + 1; k < i + length; ++k) {
      if ((byte(k) & 0xc0) != 0x80) return false;
    }
    const unsigned char second = length > 1 ? byte(i + 1) : 0;
    if ((first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f) || (first == 0xf0 && second < 0x90) ||
        (first == 0xf4 && second > 0x8f)) {
      return false;
    }
    i += length;
  }
  return true;
}

std::string without_digit_separators(std::string_view text) {
  std::string digits;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool between_digits =
        text[i] == '_' && i > 0 && i + 1 < text.size() && is_digit(text[i - 1]) && is_digit(text[i + 1]);
    if (!between_digits) digits += text[i];
  }
  return digits;
}

bool is_time_unit(std::string_view unit) { return unit == "s" || unit == "m" || unit == "h" || unit == "d"; }

bool is_known_unit(std::string_view unit) {
  return is_time_unit(unit) || unit == "steps" || unit == "tokens" || unit == "rows";
}

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t substituted = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row[b.size()];
}

std::string toml_quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      char escaped[8];
      std::snprintf(escaped, sizeof escaped, "\\u%04x", static_cast<unsigned>(static_cast<unsigned char>(c)));
      out += escaped;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

// Small visitor helper for std::variant.
template <class... Fs>
struct Overloaded : Fs... {
  using Fs::operator()...;
};
template <class... Fs>
Overloaded(Fs...) -> Overloaded<Fs...>;

}  // namespace

bool Quantity::is_time() const { return is_time_unit(unit); }

double Quantity::seconds() const {
  CRAM_DCHECK(is_time());
  if (unit == "m") return value * 60;
  if (unit == "h") return value * 3600;
  if (unit == "d") return value * 86400;
  return value;
}

std::string Quantity::text() const {
  // "100000steps" reads better than the shortest form, 1e+05steps.
  const bool whole = value == std::floor(value) && value < 1e15;
  return (whole ? std::to_string(static_cast<std::int64_t>(value)) : format_double(value)) + unit;
}

double parse_double(std::string_view text, std::string_view what) {
  const std::string digits = without_digit_separators(text);
  double value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  CRAM_CHECK(error == std::errc{} && end == digits.data() + digits.size() && std::isfinite(value), ExitCode::kUsage,
             what, ": ", quoted(text), " is not a finite number");
  return value;
}

std::int64_t parse_integer(std::string_view text, std::string_view what) {
  const std::string digits = without_digit_separators(text);
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error == std::errc{} && end == digits.data() + digits.size()) return value;
  const double real = parse_double(text, what);
  CRAM_CHECK(real == std::floor(real) && std::abs(real) < 9e15, ExitCode::kUsage, what, ": ", quoted(text),
             " is not a whole number");
  return static_cast<std::int64_t>(real);
}

Quantity parse_quantity(std::string_view text, std::string_view what) {
  // The unit is the longest run of letters at the end; an exponent ("3e9") is followed by a digit, never by the end.
  std::size_t split = text.size();
  while (split > 0 && std::isalpha(static_cast<unsigned char>(text[split - 1])) != 0) --split;
  const std::string_view number = text.substr(0, split);
  Quantity quantity;
  quantity.unit = std::string(text.substr(split));
  if (quantity.unit == "step" || quantity.unit == "token" || quantity.unit == "row") quantity.unit += "s";
  CRAM_CHECK(is_known_unit(quantity.unit) && !number.empty(), ExitCode::kUsage, what, ": ", quoted(text),
             " is not a quantity: write a number and a unit, for example 24h, 90s, 5000steps or 3e9tokens");
  quantity.value = parse_double(number, what);
  CRAM_CHECK(quantity.value >= 0, ExitCode::kUsage, what, ": ", quoted(text), " must not be negative");
  return quantity;
}

std::string format_double(double value) {
  char text[64];
  const auto [end, error] = std::to_chars(text, text + sizeof text, value);
  return error == std::errc{} ? std::string(text, end) : std::string("nan");
}

std::string format_double17(double value) {
  if (!std::isfinite(value)) return "null";
  char text[64];
  std::snprintf(text, sizeof text, "%.17g", value);
  return text;
}

std::string nearest_name(std::string_view name, const std::vector<std::string>& candidates) {
  std::string best;
  std::size_t best_distance = std::numeric_limits<std::size_t>::max();
  const std::string_view start = name.substr(0, 200);
  for (const std::string& candidate : candidates) {
    const std::size_t distance = edit_distance(start, candidate);
    if (distance < best_distance) {
      best_distance = distance;
      best = candidate;
    }
  }
  return best;
}

Option::Option(std::string key, Target target, std::string help)
    : key_(std::move(key)),
      target_(target),
      help_(std::move(help)),
      low_(-std::numeric_limits<double>::infinity()),
      high_(std::numeric_limits<double>::infinity()) {
  default_text_ = value_text();
}

Option& Option::range(double low, double high) {
  low_ = low;
  high_ = high;
  return *this;
}
Option& Option::choices(std::vector<std::string> allowed) {
  allowed_ = std::move(allowed);
  return *this;
}
Option& Option::units(std::vector<std::string> allowed) {
  allowed_ = std::move(allowed);
  return *this;
}
Option& Option::word(std::string name, std::int64_t value) {
  word_ = std::move(name);
  word_value_ = value;
  default_text_ = value_text();
  return *this;
}
Option& Option::also_called(std::vector<std::string> other_names) {
  other_names_ = std::move(other_names);
  return *this;
}
Option& Option::added_later() {
  added_later_ = true;
  return *this;
}

Option& Option::free_on_resume() {
  free_on_resume_ = true;
  return *this;
}

bool Option::is_text() const {
  return std::holds_alternative<std::string*>(target_) || std::holds_alternative<Quantity*>(target_);
}

bool Option::is_word() const {
  const auto* const* number = std::get_if<std::int64_t*>(&target_);
  return !word_.empty() && number != nullptr && **number == word_value_;
}

std::string Option::value_text() const {
  if (is_word()) return word_;
  return std::visit(Overloaded{[](const double* v) { return format_double(*v); },
                               [](const std::int64_t* v) { return std::to_string(*v); },
                               [](const bool* v) { return std::string(*v ? "true" : "false"); },
                               [](const std::string* v) { return *v; }, [](const Quantity* v) { return v->text(); }},
                    target_);
}

std::string Option::toml_text() const {
  if (is_text() || is_word()) return toml_quoted(value_text());
  std::string text = value_text();
  const bool is_double = std::holds_alternative<double*>(target_);
  // TOML tells 1 from 1.0; an exponent needs a digit before it, which to_chars gives.
  if (is_double && text.find_first_of(".en") == std::string::npos) text += ".0";
  return text;
}

std::string Option::kind() const {
  const std::string unit_list = allowed_.empty() ? "steps|tokens|time" : joined(allowed_, "|");
  return std::visit(
      Overloaded{[](const double*) { return std::string("number"); },
                 [this](const std::int64_t*) { return word_.empty() ? std::string("integer") : "integer|" + word_; },
                 [](const bool*) { return std::string("true|false"); },
                 [this](const std::string*) { return allowed_.empty() ? "text" : joined(allowed_, "|"); },
                 [&](const Quantity*) { return "quantity in " + unit_list; }},
      target_);
}

void Option::assign(std::string_view text, const std::string& origin) {
  const std::string what = concat(origin, ": ", key_);
  const auto check_range = [&](double value) {
    CRAM_CHECK(value >= low_ && value <= high_, ExitCode::kUsage, what, ": ", quoted(text),
               " is out of range, expected ", format_double(low_), " to ", format_double(high_));
  };
  std::visit(Overloaded{[&](double* v) {
                          const double value = parse_double(text, what);
                          check_range(value);
                          *v = value;
                        },
                        [&](std::int64_t* v) {
                          if (!word_.empty() && text == word_) {
                            *v = word_value_;
                            return;
                          }
                          const std::int64_t value =
                              parse_integer(text, word_.empty() ? what : concat(what, " (a number or ", word_, ")"));
                          check_range(static_cast<double>(value));
                          *v = value;
                        },
                        [&](bool* v) {
                          CRAM_CHECK(text == "true" || text == "false", ExitCode::kUsage, what, ": ", quoted(text),
                                     " is not true or false");
                          *v = text == "true";
                        },
                        [&](std::string* v) {
                          const bool allowed =
                              allowed_.empty() || std::find(allowed_.begin(), allowed_.end(), text) != allowed_.end();
                          CRAM_CHECK(allowed, ExitCode::kUsage, what, ": ", quoted(text), " is not one of ",
                                     joined(allowed_, ", "), "; did you mean ", nearest_name(text, allowed_), "?");
                          CRAM_CHECK(text.find('\0') == std::string_view::npos, ExitCode::kUsage, what,
                                     " contains a NUL byte");
                          CRAM_CHECK(is_utf8(text), ExitCode::kUsage, what, ": the value is not valid UTF-8");
                          *v = std::string(text);
                        },
                        [&](Quantity* v) {
                          // Nothing needs no unit.
                          const Quantity value = text == "0" ? Quantity{0, v->unit} : parse_quantity(text, what);
                          const std::string family = value.is_time() ? "time" : value.unit;
                          const bool allowed =
                              allowed_.empty() || std::find(allowed_.begin(), allowed_.end(), family) != allowed_.end();
                          CRAM_CHECK(allowed, ExitCode::kUsage, what, ": ", quoted(text), " has the unit ", value.unit,
                                     ", expected one of ", joined(allowed_, ", "));
                          check_range(value.value);
                          *v = value;
                        }},
             target_);
  origin_ = origin;
}

Option& OptionTable::add(std::string key, Option::Target target, std::string help) {
  CRAM_DCHECK(find(key) == nullptr);
  return rows_.emplace_back(std::move(key), target, std::move(help));
}

const Option* OptionTable::find(std::string_view key) const {
  const auto row = std::find_if(rows_.begin(), rows_.end(), [&](const Option& option) { return option.key() == key; });
  return row == rows_.end() ? nullptr : &*row;
}

Option* OptionTable::find_mutable(std::string_view key) {
  const auto row = std::find_if(rows_.begin(), rows_.end(), [&](const Option& option) { return option.key() == key; });
  return row == rows_.end() ? nullptr : &*row;
}

const Option& OptionTable::at(std::string_view key) const {
  const Option* row = find(key);
  if (row == nullptr) throw std::logic_error(concat("no such option: ", key));
  return *row;
}

void OptionTable::set(std::string_view key, std::string_view text, const std::string& origin) {
  Option* row = find_mutable(key);
  if (row == nullptr) {
    // Compare with the names and the names people use elsewhere, with and without the section.
    std::vector<std::string> names;
    std::map<std::string, std::string> key_of;
    const auto offer = [&](const std::string& name, const std::string& known) {
      if (key_of.emplace(name, known).second) names.push_back(name);
    };
    const bool has_section = key.find('.') != std::string_view::npos;
    for (const Option& option : rows_) {
      const std::string section = option.key().substr(0, option.key().find('.') + 1);
      offer(option.key(), option.key());
      for (const std::string& other : option.other_names()) offer(section + other, option.key());
      if (has_section) continue;
      offer(option.key().substr(section.size()), option.key());
      for (const std::string& other : option.other_names()) offer(other, option.key());
    }
    fail(ExitCode::kUsage, origin, ": unknown option ", quoted(key), "; the nearest known one is ",
         key_of[nearest_name(key, names)], " (--help lists all)");
  }
  row->assign(text, origin);
}

void OptionTable::apply_override(std::string_view assignment) {
  CRAM_CHECK(assignment.size() <= kLongestOverride, ExitCode::kUsage, "command line: an argument of ",
             assignment.size(), " characters is not an option, at most ", kLongestOverride, " are read");
  const std::size_t equals = assignment.find('=');
  CRAM_CHECK(equals != std::string_view::npos && equals > 0, ExitCode::kUsage, "command line: ", quoted(assignment),
             " is neither a flag nor of the form section.key=value");
  set(assignment.substr(0, equals), assignment.substr(equals + 1), "command line");
}

void OptionTable::load_toml_file(const std::string& path) {
  for (const TomlValue& value : read_toml_file(path)) {
    if (value.is_empty_section) {
      std::vector<std::string> sections;
      for (const Option& row : rows_) sections.push_back(row.key().substr(0, row.key().find('.')));
      CRAM_CHECK(std::find(sections.begin(), sections.end(), value.key) != sections.end(), ExitCode::kUsage,
                 value.origin, ": unknown section ", quoted(value.key), "; the nearest known one is ",
                 nearest_name(value.key, sections));
      continue;
    }
    if (const Option* row = find(value.key)) {
      const bool is_named = value.is_string && row->knows_word(value.text);
      CRAM_CHECK(row->is_text() == value.is_string || is_named, ExitCode::kUsage, value.origin, ": ", value.key,
                 " expects ", row->kind(), row->is_text() ? " in quotes" : " without quotes", ", got ",
                 quoted(value.text));
    }
    set(value.key, value.text, value.origin);
  }
}

std::string OptionTable::dump_toml(bool with_help) const {
  std::string out;
  std::string section;
  for (const Option& row : rows_) {
    const std::size_t dot = row.key().find('.');
    const std::string row_section = row.key().substr(0, dot);
    if (row_section != section) {
      out += concat(section.empty() ? "" : "\n", "[", row_section, "]\n");
      section = row_section;
    }
    out += concat(row.key().substr(dot + 1), " = ", row.toml_text());
    if (with_help) out += concat("  # ", row.help());
    out += '\n';
  }
  return out;
}

std::map<std::string, std::string> OptionTable::values() const {
  std::map<std::string, std::string> all;
  for (const Option& row : rows_) all[row.key()] = row.value_text();
  return all;
}

std::string OptionTable::help_text() const {
  std::string out;
  for (const Option& row : rows_) {
    const std::string left = concat("  ", row.key(), "=", row.default_text());
    out += left + std::string(left.size() < 40 ? 40 - left.size() : 1, ' ') + row.help() + " [" + row.kind() + "]\n";
  }
  return out;
}

}  // namespace cram
