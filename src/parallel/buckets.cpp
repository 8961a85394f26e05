#include "parallel/buckets.h"

#include <algorithm>

#include "base/check.h"

namespace cram {

std::vector<Bucket> cut_buckets(std::int64_t numel, const Partition& partition) {
  const std::int64_t unit = partition.alignment();
  CRAM_DCHECK(numel % unit == 0);
  CRAM_CHECK(partition.rank >= 0 && partition.rank < partition.size, ExitCode::kOther, "rank ", partition.rank,
             " owns no part of a partition of ", partition.size);
  const std::int64_t length = std::max(unit, partition.bucket_elements / unit * unit);
  std::vector<Bucket> buckets;
  for (std::int64_t begin = 0; begin < numel; begin += length) {
    const std::int64_t end = std::min(begin + length, numel);
    const std::int64_t share = (end - begin) / partition.size;
    buckets.push_back(
        {begin, end, begin + share * partition.rank, begin + share * (partition.rank + 1), begin / partition.size});
  }
  return buckets;
}

}  // namespace cram
