// Made-up rows for measurements: speed does not depend on what the tokens mean.
#pragma once

#include <vector>

#include "data/batch.h"
#include "data/masking.h"
#include "parallel/mesh.h"
#include "train/train_config.h"

namespace cram {

/// Fills in what the shards would decide (V 32768, S 128; no shard is read), makes a batch of four micro-batches unless
/// a size was chosen, and checks the configuration.
void prepare_synthetic(Config& config, const Layout& layout);

/// Micro-batches of uniformly drawn tokens with the recipe's number of masked positions; a few made once, given in
/// turn.
class SyntheticBatches {
 public:
  /// `pin_memory`: page-locked, as the loader's are for a GPU.
  SyntheticBatches(const Config& config, int dp_rank, bool pin_memory = false);
  [[nodiscard]] Batch next();

 private:
  std::vector<Batch> batches_;
  std::size_t next_ = 0;
};

}  // namespace cram
