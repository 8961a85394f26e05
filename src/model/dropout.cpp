#include "model/dropout.h"

#include <ATen/Parallel.h>
#include <torch/types.h>

#include "base/rng.h"

namespace cram {

void dropout_(const at::Tensor& x, const DropoutSource& source, std::int64_t layer, DropoutSite site,
              std::int64_t first_row) {
  if (source.rate == 0) return;
  const std::int64_t width = x.size(1);
  const auto threshold = static_cast<std::uint32_t>(source.rate * 0x1p32);
  const auto kept = static_cast<float>(1 / (1 - source.rate));
  const std::uint64_t key = stream_key(source.seed, "dropout", static_cast<std::uint64_t>(source.step),
                                       static_cast<std::uint64_t>(layer + 1) * 4 + static_cast<std::uint64_t>(site));
  // Made on the host and copied: pretraining, whose speed matters, uses none.
  const at::Tensor mask = at::empty(x.sizes(), at::kFloat);
  auto* values = mask.data_ptr<float>();
  at::parallel_for(0, x.size(0), 64, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t token = first_row + row;
      const auto sample = static_cast<std::uint64_t>(source.first_sample + token / source.seq_length);
      const auto first_element = static_cast<std::uint64_t>(token % source.seq_length * width);
      for (std::int64_t h = 0; h < width; ++h) {
        const std::uint64_t element = first_element + static_cast<std::uint64_t>(h);
        // Four elements share a block of the generator; the high half of the counter is the sample.
        const std::uint32_t bits = philox(key, element / 4, sample)[element % 4];
        values[row * width + h] = bits < threshold ? 0.0F : kept;
      }
    }
  });
  x.mul_(mask.to(x.device()));
}

}  // namespace cram
