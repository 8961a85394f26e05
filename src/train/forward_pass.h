// Forward passes of a whole model, without gradients, through the stages of a pipeline: evaluation and predictions.
#pragma once

#include "model/model.h"
#include "parallel/mesh.h"
#include "parallel/pipeline.h"

namespace cram {

/// Methods are collective over the tensor and the pipeline group. Batches are on the host or the model's device.
class ForwardPass final : public PipelineStage {
 public:
  /// All must outlive it. `pipeline` has as many ranks as the model has stages.
  ForwardPass(Model& model, const ParameterStore& store, Communicator& pipeline)
      : model_(model), store_(store), pipeline_(pipeline) {}

  /// Loss sum and number of correct predictions. With several stages they are on the last one, and zero elsewhere, so
  /// that stages can run ahead of each other; the caller adds them up.
  [[nodiscard]] Objective::Evaluation evaluate(const Batch& batch);
  /// The objective's outputs [M,C] for the rows `picks` [M] (b*S+s) of ids [B,S], on every rank. `lengths` [B] as in
  /// field::kLengths, or undefined.
  [[nodiscard]] at::Tensor outputs(const at::Tensor& ids, const at::Tensor& picks,
                                   const at::Tensor& lengths = at::Tensor());
  /// Hidden states [B,S,H] after the final norm, on every rank.
  [[nodiscard]] at::Tensor hidden(const at::Tensor& ids, const at::Tensor& lengths = at::Tensor());

  // PipelineStage
  [[nodiscard]] at::Tensor forward(int block, int micro_batch, const at::Tensor& input) override;
  [[nodiscard]] at::Tensor backward(int block, int micro_batch, const at::Tensor& d_output) override;
  [[nodiscard]] at::Tensor make_activation(int micro_batch) override;

 private:
  /// The last hidden states on the last stage (the picked rows', or all), undefined elsewhere.
  [[nodiscard]] at::Tensor run(const Batch& batch, const at::Tensor& picks);
  /// What the last stage made, on every stage.
  [[nodiscard]] at::Tensor share(at::Tensor made) const;

  Model& model_;
  const ParameterStore& store_;
  Communicator& pipeline_;
  MicroBatch batch_;
  at::Tensor last_;
};

}  // namespace cram
