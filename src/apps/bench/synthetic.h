// Runs of measurements on made-up rows.
#pragma once

#include "apps/bench/bench.h"
#include "parallel/mesh.h"
#include "train/run_description.h"
#include "train/synthetic_batches.h"

namespace cram {

/// What is measured: the configuration as given, with what the shards would decide filled in (V 32768, S 128; no shard
/// is read) and a batch of four micro-batches unless a size was chosen. Sets this process's threads. Collective.
[[nodiscard]] RunDescription resolve_synthetic(const BenchContext& context, const Layout& layout);

}  // namespace cram
