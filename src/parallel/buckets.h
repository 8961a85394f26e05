// How flat buffers are cut for communication over the data ranks, and which part of each piece a rank owns (ZeRO stage
// 1, Rajbhandari et al. 2020, section 5.1).
#pragma once

#include <cstdint>
#include <vector>

namespace cram {

/// Elements of one bucket; the same for every number of ranks and any overlap (rounded down to a multiple of 64 x ranks
/// when the optimizer's state is shared out).
inline constexpr std::int64_t kBucketElements = 1 << 22;

/// Who owns what of every flat buffer: rank r of `size` the r-th part of each bucket. Size 1: everything.
struct Partition {
  int rank = 0;
  int size = 1;
  std::int64_t bucket_elements = kBucketElements;

  /// Flat buffers are padded to a multiple of this, so that every bucket has equal parts that start on cache lines.
  [[nodiscard]] std::int64_t alignment() const { return 64 * std::int64_t{size}; }
};

/// Elements [begin, end) of a flat buffer. This rank owns [own_begin, own_end) of them; they lie at `at` in its buffers
/// of owned elements.
struct Bucket {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t own_begin = 0;
  std::int64_t own_end = 0;
  std::int64_t at = 0;

  [[nodiscard]] std::int64_t numel() const { return end - begin; }
  [[nodiscard]] std::int64_t owned() const { return own_end - own_begin; }
};

/// `numel` must be a multiple of partition.alignment().
[[nodiscard]] std::vector<Bucket> cut_buckets(std::int64_t numel, const Partition& partition);

}  // namespace cram
