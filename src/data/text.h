// Text as people have it, and the nine steps that make it what the tokenizer sees.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace cram {

struct CleanCounts {
  std::int64_t invalid_bytes = 0;  ///< not UTF-8
  std::int64_t nul_bytes = 0;
};

/// Appends `raw` to `out` without bytes that are not UTF-8 and without NULs; adds what was dropped to `counts`.
void append_clean_utf8(std::string_view raw, std::string& out, CleanCounts& counts);

/// Number of code points of valid UTF-8.
[[nodiscard]] std::int64_t count_code_points(std::string_view utf8) noexcept;

/// Name of the encoding that a byte order mark at the start announces, "" for UTF-8 or none.
[[nodiscard]] std::string foreign_encoding(std::string_view first_bytes);

/// The normaliser, in this order, the same as in an exported tokenizer.json: 1 `` and '' to " · 2 NFD · 3 lower case ·
/// 4 drop non-spacing marks · 5 drop what is not ASCII · 6 white space to space · 7 drop control characters · 8 strip ·
/// 9 runs of spaces to one. Invalid UTF-8 is dropped first. A second application changes nothing, except where
/// dropping a character made two quotes neighbours.
[[nodiscard]] std::string normalize(std::string_view text);

}  // namespace cram
