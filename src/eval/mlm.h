// Held-out masked-language-model loss: the validation split with fixed masks (seed 0, epoch 0), whatever the run.
#pragma once

#include <memory>

#include "data/shard_set.h"
#include "model/model.h"
#include "parallel/mesh.h"
#include "run/metrics.h"

namespace cram {

struct MlmEvalSettings {
  std::int64_t rows = 2048;        ///< at most; the first ones of the split
  std::int64_t micro_batch = 128;  ///< rows a forward pass; does not change the result beyond rounding
  double mask_rate = 0.25;
};

/// Data ranks share the rows; the result is the same on every rank. Collective over the world.
[[nodiscard]] EvalRecord evaluate_mlm(Model& model, const ParameterStore& store, ShardSet& validation,
                                      const MlmEvalSettings& settings, const Mesh& mesh);

}  // namespace cram
