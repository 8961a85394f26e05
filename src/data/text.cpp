#include "data/text.h"

#include <utf8proc.h>

#include <array>

namespace cram {
namespace {

const utf8proc_uint8_t* as_utf8(const char* text) { return reinterpret_cast<const utf8proc_uint8_t*>(text); }

/// Length of the valid code point at the start of `text` (0 when it is not one).
std::size_t next_code_point(std::string_view text, utf8proc_int32_t& code_point) {
  const utf8proc_ssize_t length =
      utf8proc_iterate(as_utf8(text.data()), static_cast<utf8proc_ssize_t>(text.size()), &code_point);
  return length > 0 ? static_cast<std::size_t>(length) : 0;
}

// Steps 2 to 5 for one code point outside ASCII. Reordering of marks, the other half of NFD, cannot be seen here: marks
// are dropped in step 4.
void append_ascii_of(utf8proc_int32_t code_point, std::string& out) {
  std::array<utf8proc_int32_t, 32> decomposed;
  int boundary = 0;
  const utf8proc_ssize_t count = utf8proc_decompose_char(
      code_point, decomposed.data(), static_cast<utf8proc_ssize_t>(decomposed.size()), UTF8PROC_DECOMPOSE, &boundary);
  for (utf8proc_ssize_t i = 0; i < count && i < static_cast<utf8proc_ssize_t>(decomposed.size()); ++i) {
    const utf8proc_int32_t lower = utf8proc_tolower(decomposed[static_cast<std::size_t>(i)]);
    if (utf8proc_category(lower) == UTF8PROC_CATEGORY_MN) continue;
    if (lower >= 0 && lower < 0x80) out.push_back(static_cast<char>(lower));
  }
}

bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

}  // namespace

void append_clean_utf8(std::string_view raw, std::string& out, CleanCounts& counts) {
  std::size_t clean_from = 0;
  std::size_t at = 0;
  const auto flush = [&] { out.append(raw.substr(clean_from, at - clean_from)); };
  while (at < raw.size()) {
    const auto byte = static_cast<unsigned char>(raw[at]);
    if (byte != 0 && byte < 0x80) {
      ++at;
      continue;
    }
    utf8proc_int32_t code_point = 0;
    const std::size_t length = byte == 0 ? 0 : next_code_point(raw.substr(at), code_point);
    if (length > 0) {
      at += length;
      continue;
    }
    flush();
    ++(byte == 0 ? counts.nul_bytes : counts.invalid_bytes);
    clean_from = ++at;
  }
  flush();
}

std::int64_t count_code_points(std::string_view utf8) noexcept {
  std::int64_t count = 0;
  for (const char c : utf8) count += (static_cast<unsigned char>(c) & 0xC0U) != 0x80U ? 1 : 0;
  return count;
}

std::string foreign_encoding(std::string_view first_bytes) {
  const auto starts = [&](std::string_view mark) { return first_bytes.substr(0, mark.size()) == mark; };
  if (starts(std::string_view("\xFF\xFE\0\0", 4))) return "UTF-32LE";
  if (starts(std::string_view("\0\0\xFE\xFF", 4))) return "UTF-32BE";
  if (starts("\xFF\xFE")) return "UTF-16LE";
  if (starts("\xFE\xFF")) return "UTF-16BE";
  return "";
}

std::string normalize(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  // Steps 1 to 7 left to right; the last two are applied as the characters arrive.
  bool space_pending = false;
  const auto emit = [&](char c) {
    if (is_space(c)) {
      space_pending = true;
      return;
    }
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) return;
    if (space_pending && !out.empty()) out.push_back(' ');
    space_pending = false;
    out.push_back(c);
  };
  std::string expanded;
  for (std::size_t at = 0; at < text.size();) {
    const char c = text[at];
    if (static_cast<unsigned char>(c) < 0x80) {
      if ((c == '`' || c == '\'') && at + 1 < text.size() && text[at + 1] == c) {
        emit('"');
        at += 2;
        continue;
      }
      emit(c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c);
      ++at;
      continue;
    }
    utf8proc_int32_t code_point = 0;
    const std::size_t length = next_code_point(text.substr(at), code_point);
    if (length > 0) {
      expanded.clear();
      append_ascii_of(code_point, expanded);
      for (const char e : expanded) emit(e);
    }
    at += length > 0 ? length : 1;
  }
  return out;
}

}  // namespace cram
