// Made-up rows for measurements: speed does not depend on what the tokens mean.
#pragma once

#include <vector>

#include "data/batch_source.h"
#include "train/train_config.h"

namespace cram {

/// Micro-batches of uniformly drawn tokens with the recipe's number of masked positions; a few made once, given in
/// turn.
class SyntheticBatches final : public BatchSource {
 public:
  /// `pin_memory`: page-locked, as the loader's are for a GPU.
  SyntheticBatches(const Config& config, int dp_rank, bool pin_memory = false);
  [[nodiscard]] Batch next() override;

 private:
  std::vector<Batch> batches_;
  std::size_t next_ = 0;
};

}  // namespace cram
