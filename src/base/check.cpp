#include "base/check.h"

#include <cstdio>
#include <cstdlib>

namespace cram::detail {

void dcheck_failed(const char* condition, const char* file, int line) {
  std::fprintf(stderr, "cram: internal check failed: %s at %s:%d\n", condition, file, line);
  std::abort();
}

}  // namespace cram::detail
