// Gradient norm, clipping and the AdamW update over the parameter store's flat buffers.
#pragma once

#include "model/parameter_store.h"
#include "parallel/mesh.h"

namespace cram {

struct OptimizerSettings {
  double beta1 = 0.9;
  double beta2 = 0.98;
  double eps = 1e-12;
  double weight_decay = 0.01;
  double clip = 0.5;  ///< largest global L2 norm; 0 = no clipping
};

/// min(1, clip/(norm + 1e-6)); 1 when clip is 0.
[[nodiscard]] double clip_factor(double norm, double clip);

class Optimizer {
 public:
  /// The mesh must outlive the optimizer.
  Optimizer(ParameterStore& store, const OptimizerSettings& settings, const Mesh& mesh)
      : store_(store), settings_(settings), mesh_(mesh) {}

  /// L2 norm of the whole model's reduced gradients as they are (of the loss sum), fp64, in a fixed order for any
  /// thread count: every parameter once, whether it is sharded over tensor ranks, shared out over data ranks, on
  /// another stage or held by several. One sum over the world, so the same bits on all ranks.
  [[nodiscard]] double grad_norm() const;

  /// One update number `step` (from 1) with the gradients times `grad_scale`; clears the gradients. Where the state is
  /// shared out, every rank updates its part and the working weights are gathered over the data ranks.
  void update(std::int64_t step, double lr, double grad_scale);

  [[nodiscard]] const OptimizerSettings& settings() const { return settings_; }

 private:
  ParameterStore& store_;
  OptimizerSettings settings_;
  const Mesh& mesh_;
};

}  // namespace cram
