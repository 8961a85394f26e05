// Runs a pipeline plan: computes this rank's blocks and exchanges activations and gradients with its neighbours.
#pragma once

#include <ATen/core/Tensor.h>

#include "parallel/communicator.h"
#include "parallel/pipeline_plan.h"

namespace cram {

/// What a rank computes: the parallel room knows tensors, not models.
class PipelineStage {
 public:
  virtual ~PipelineStage() = default;
  /// `input`: the activation that the block before made, undefined for block 0. Returns this block's activation,
  /// contiguous; undefined for the last block, whose result (the loss) stays with it.
  [[nodiscard]] virtual at::Tensor forward(int block, int micro_batch, const at::Tensor& input) = 0;
  /// `d_output`: gradient of the activation that `forward` returned, undefined for the last block. Returns the gradient
  /// of the input; undefined for block 0. Never called by a plan that only goes forward.
  [[nodiscard]] virtual at::Tensor backward(int block, int micro_batch, const at::Tensor& d_output) = 0;
  /// An activation of a micro-batch (their lengths may differ) between two blocks, to be received into.
  [[nodiscard]] virtual at::Tensor make_activation(int micro_batch) = 0;
};

/// Runs `plan` to its end. Receives are waited for where the plan has them; sends go on in the background, kept alive
/// until they are over. With one stage nothing is exchanged, and this is the plain loop over micro-batches.
void run_pipeline(const StagePlan& plan, const PlanShape& shape, PipelineStage& stage, Communicator& pipeline);

}  // namespace cram
