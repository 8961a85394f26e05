// The only file that sees toml++ (2.6 s to parse): reads a TOML document and flattens it to dotted keys.
//
// Its assertions are off in every build: some malformed keys trip them where the release build reports a parse error.
#define TOML_ASSERT(condition) static_assert(true)
#include <toml++/toml.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <sstream>

#include "base/file_io.h"
#include "base/options.h"

namespace cram {
namespace {

constexpr std::uintmax_t kLargestFile = 1 << 20;  // bytes; beyond it the parser's recursion is not to be trusted
constexpr std::size_t kLongestLine = 4096;        // a dotted key of 100k parts overflows the parser's stack

std::string where(const std::string& path, const toml::source_region& source) {
  return concat(path, ":", source.begin.line, ":", source.begin.column);
}

void flatten(const std::string& path, const std::string& prefix, const toml::table& table,
             std::vector<TomlValue>& out) {
  for (const auto& [name, node] : table) {
    const std::string key = prefix.empty() ? std::string(name.str()) : prefix + "." + std::string(name.str());
    const std::string origin = where(path, node.source());
    if (const toml::table* inner = node.as_table()) {
      if (inner->empty()) out.push_back({key, "", origin, false, true});
      flatten(path, key, *inner, out);
    } else if (const auto* text = node.as_string()) {
      out.push_back({key, text->get(), origin, true});
    } else if (const auto* integer = node.as_integer()) {
      out.push_back({key, std::to_string(integer->get()), origin, false});
    } else if (const auto* real = node.as_floating_point()) {
      out.push_back({key, format_double(real->get()), origin, false});
    } else if (const auto* boolean = node.as_boolean()) {
      out.push_back({key, boolean->get() ? "true" : "false", origin, false});
    } else {
      fail(ExitCode::kUsage, origin, ": ", key, " is an array or a date; expected text, a number or true/false");
    }
  }
}

}  // namespace

std::vector<TomlValue> read_toml_file(const std::string& path) {
  const std::string content = read_file(path, ExitCode::kUsage, kLargestFile);
  std::size_t line_number = 1;
  for (std::size_t start = 0; start < content.size(); ++line_number) {
    const std::size_t end = std::min(content.find('\n', start), content.size());
    CRAM_CHECK(end - start <= kLongestLine, ExitCode::kUsage, path, ":", line_number, ":1: a line of ", end - start,
               " characters, at most ", kLongestLine, " are read");
    start = end + 1;
  }
  std::vector<TomlValue> values;
  try {
    flatten(path, "", toml::parse(content, path), values);
  } catch (const toml::parse_error& error) {
    fail(ExitCode::kUsage, where(path, error.source()), ": not valid TOML: ", error.description());
  }
  // toml++ keeps tables sorted by name; errors should come in the order of the file.
  std::stable_sort(values.begin(), values.end(), [](const TomlValue& a, const TomlValue& b) {
    const auto line = [](const TomlValue& v) {
      const std::size_t column_colon = v.origin.rfind(':');
      const std::size_t line_colon = v.origin.rfind(':', column_colon - 1);
      return std::stoull(v.origin.substr(line_colon + 1));
    };
    return line(a) < line(b);
  });
  // A quoted "a.b" and b of table a are two keys to TOML and one option to us.
  std::map<std::string_view, std::string_view> origin_of;
  for (const TomlValue& value : values) {
    const auto [first, is_new] = origin_of.emplace(value.key, value.origin);
    CRAM_CHECK(is_new, ExitCode::kUsage, value.origin, ": ", value.key, " is set twice, first at ", first->second);
  }
  return values;
}

}  // namespace cram
