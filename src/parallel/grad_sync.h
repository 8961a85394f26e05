// Sums gradients over the data ranks, in buckets of a fixed size.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "parallel/communicator.h"

namespace cram {

/// Elements of one bucket. Fixed, so that the same sums are formed for every number of ranks and any overlap.
inline constexpr std::int64_t kBucketElements = 1 << 22;

/// All-reduces every flat gradient buffer over `data`, bucket by bucket, several in flight. Sums, no averages: the loss
/// is a sum and is divided once.
void reduce_gradients(Communicator& data, const std::vector<at::Tensor>& flat_gradients);

}  // namespace cram
