// Dropout whose mask is a pure function of (seed, step, layer, site, global sample, element of the sample): equal on
// ranks that hold the same values, and a slice of the dense mask on ranks that hold a part, in every layout, after a
// resume, and when a layer is computed again for its backward pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace cram {

struct DropoutSource {
  double rate = 0;  ///< 0: nothing is dropped, and nothing costs
  std::uint64_t seed = 0;
  std::int64_t step = 0;
  std::int64_t first_sample = 0;  ///< global number of the micro-batch's first row of tokens
  std::int64_t seq_length = 1;    ///< tokens of a sample
};

enum class DropoutSite { kEmbedding, kAttention, kFfn };

/// x [n,H], rows first_row.. of the micro-batch's flattened tokens: x * mask / (1 - rate), in place. The same call on
/// the gradient is the backward pass. Layer -1 is the embedding.
void dropout_(const at::Tensor& x, const DropoutSource& source, std::int64_t layer, DropoutSite site,
              std::int64_t first_row);

}  // namespace cram
