#include "base/check.h"

#include <cstdio>
#include <cstdlib>

namespace cram {

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (const std::int64_t extent : shape) text += concat(text.size() > 1 ? "," : "", extent);
  return text + "]";
}

}  // namespace cram

namespace cram::detail {

void dcheck_failed(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "cram: internal check failed: %s at %s:%d\n", condition, file, line);
  std::abort();
}

}  // namespace cram::detail
