#include "train/synthetic_batches.h"

#include <torch/types.h>

#include <algorithm>

#include "base/rng.h"
#include "base/special_tokens.h"

namespace cram {

SyntheticBatches::SyntheticBatches(const Config& config, int dp_rank, bool pin_memory) {
  constexpr int kMade = 4;
  const std::int64_t rows = config.train.micro_batch_size, seq = config.model.seq_length;
  const std::int64_t masked = masked_in_row(config);
  RandomStream random(stream_key(1, "synthetic", static_cast<std::uint64_t>(dp_rank)));
  const auto words = static_cast<std::uint64_t>(config.model.vocab_size - kSpecialTokens);
  for (int b = 0; b < kMade; ++b) {
    const at::Tensor tokens = at::empty({rows, seq}, at::kLong);
    const at::Tensor positions = at::empty({rows * masked}, at::kLong), labels = at::empty_like(positions);
    auto* ids = tokens.data_ptr<std::int64_t>();
    for (std::int64_t i = 0; i < rows * seq; ++i)
      ids[i] = kSpecialTokens + static_cast<std::int64_t>(random.below(words));
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::vector<std::uint64_t> order = random_permutation(static_cast<std::uint64_t>(seq), random.next_u64());
      std::vector<std::int64_t> chosen(order.begin(), order.begin() + masked);
      std::sort(chosen.begin(), chosen.end());
      for (std::int64_t i = 0; i < masked; ++i) {
        const std::int64_t position = r * seq + chosen[static_cast<std::size_t>(i)];
        positions.data_ptr<std::int64_t>()[r * masked + i] = position;
        labels.data_ptr<std::int64_t>()[r * masked + i] = ids[position];
        ids[position] = kMaskId;
      }
    }
    const Batch batch(rows, seq,
                      {{std::string(field::kIds), tokens},
                       {std::string(field::kPositions), positions},
                       {std::string(field::kLabels), labels}});
    batches_.push_back(pin_memory ? batch.map([](const at::Tensor& x) { return x.pin_memory(); }) : batch);
  }
}

Batch SyntheticBatches::next() { return batches_[next_++ % batches_.size()]; }

}  // namespace cram
