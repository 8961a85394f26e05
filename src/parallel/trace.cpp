#include "parallel/trace.h"

#include <c10/core/ScalarType.h>

#include "base/check.h"

namespace cram {

std::string TraceEntry::text() const {
  return concat("#", sequence, " ", operation, " ", count, " x ", dtype, " (", bytes, " bytes)");
}

void CommunicationTrace::record(const char* operation, at::ScalarType dtype, std::int64_t count, double bytes) {
  entries_.push_back({next_++, operation, c10::toString(dtype), count, bytes});
  if (entries_.size() > kKept) entries_.pop_front();
  bytes_[operation] += bytes;
}

double CommunicationTrace::total_bytes() const {
  double total = 0;
  for (const auto& [operation, bytes] : bytes_) total += bytes;
  return total;
}

}  // namespace cram
