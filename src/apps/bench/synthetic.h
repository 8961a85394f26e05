// Configurations of measurements on made-up rows.
#pragma once

#include "parallel/mesh.h"
#include "train/synthetic_batches.h"
#include "train/train_config.h"

namespace cram {

/// Fills in what the shards would decide (V 32768, S 128; no shard is read), makes a batch of four micro-batches unless
/// a size was chosen, and checks the configuration.
void prepare_synthetic(Config& config, const Layout& layout);

}  // namespace cram
