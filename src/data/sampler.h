// The position in the data is one number: g, the count of samples consumed since step 0.
#pragma once

#include <cstdint>
#include <vector>

namespace cram {

struct SampleId {
  std::int64_t epoch = 0;
  std::int64_t row = 0;  ///< global row id of the split
  bool operator==(const SampleId&) const = default;
};

/// Maps g to (epoch, row): epoch = g div N, row = order[g mod N]. The order is the prepared one in every epoch, or with
/// `shuffle` a permutation keyed by (seed, epoch). The map is pure; only the latest epoch's permutation is remembered.
class Sampler {
 public:
  /// Error(kData) when there are no rows.
  Sampler(std::int64_t rows, std::uint64_t seed, bool shuffle);
  [[nodiscard]] SampleId at(std::int64_t sample);

 private:
  std::int64_t rows_;
  std::uint64_t seed_;
  bool shuffle_;
  std::int64_t permuted_epoch_ = -1;
  std::vector<std::uint64_t> permutation_;
};

}  // namespace cram
