// What a group did: a sequence number, operation, element type, count and bytes each, the last ones kept by name. Two
// ranks of a group with different traces have gone apart, and the first difference says where.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <map>
#include <string>

namespace cram {

struct TraceEntry {
  std::int64_t sequence = 0;  ///< from 0, per group
  std::string operation;
  std::string dtype;
  std::int64_t count = 0;  ///< elements of the payload
  double bytes = 0;        ///< that this rank sends by the usual algorithms' count, see `record`

  [[nodiscard]] std::string text() const;
};

class CommunicationTrace {
 public:
  static constexpr std::size_t kKept = 256;

  /// Bytes counted: payload x 2(n-1)/n for all-reduce, (n-1)/n for reduce-scatter and all-gather (payload = the full
  /// tensor), payload for a sent message and for a broadcast by its root; nothing for received ones.
  void record(const char* operation, at::ScalarType dtype, std::int64_t count, double bytes);

  [[nodiscard]] const std::deque<TraceEntry>& entries() const { return entries_; }
  [[nodiscard]] std::int64_t operations() const { return next_; }
  /// Bytes by operation since the last reset.
  [[nodiscard]] const std::map<std::string, double>& bytes() const { return bytes_; }
  [[nodiscard]] double total_bytes() const;
  void reset_bytes() { bytes_.clear(); }

 private:
  std::deque<TraceEntry> entries_;
  std::int64_t next_ = 0;
  std::map<std::string, double> bytes_;
};

}  // namespace cram
