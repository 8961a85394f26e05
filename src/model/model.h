// A rank's part of a model: the trunk, and on the last stage the objective with its head.
#pragma once

#include <memory>
#include <set>
#include <string>

#include "model/encoder.h"
#include "model/objective.h"

namespace cram {

class Model {
 public:
  /// Registers all parameters of this rank: the trunk's, then the objective's own.
  Model(const ModelConfig& config, ParameterStore& store, const Placement& placement, const std::string& objective);
  /// One rank, which the model keeps a group of its own for.
  Model(const ModelConfig& config, ParameterStore& store, const std::string& objective = "mlm");

  [[nodiscard]] Encoder& encoder() { return *encoder_; }
  [[nodiscard]] const Encoder& encoder() const { return *encoder_; }
  [[nodiscard]] const ModelConfig& config() const { return encoder_->config(); }
  /// On the last stage only.
  [[nodiscard]] bool has_objective() const { return objective_ != nullptr; }
  [[nodiscard]] const Objective& objective() const { return *objective_; }

  /// What one block makes of a micro-batch, and what its backward pass needs.
  struct BlockSaved {
    Encoder::BlockSaved trunk;
    Objective::Saved objective;
    at::Tensor loss_sum;  ///< [] fp64, of the last block
  };
  /// Encoder::forward_block, and on the last block the loss; returns an undefined tensor there.
  [[nodiscard]] at::Tensor forward(int block, const MicroBatch& batch, const at::Tensor& x, BlockSaved& saved);
  /// Adds the gradient of the loss SUM; `dy` is undefined for the last block.
  [[nodiscard]] at::Tensor backward(int block, const MicroBatch& batch, const at::Tensor& dy, BlockSaved& saved,
                                    const Encoder::GradientsComplete& complete);
  /// The batch with what the objective wants of the last hidden states.
  [[nodiscard]] MicroBatch micro_batch(Batch fields, const DropoutSource& dropout = {}) const;

 private:
  Model(const ModelConfig& config, ParameterStore& store, std::unique_ptr<Communicator> alone,
        const std::string& objective);
  std::unique_ptr<Communicator> alone_;
  std::unique_ptr<Encoder> encoder_;
  std::unique_ptr<Objective> objective_;
  ParamId own_first_ = 0, own_end_ = 0;  // the objective's parameters
};

/// Names of all parameters of a model, whatever this rank holds of it.
[[nodiscard]] std::set<std::string> parameter_names(const ModelConfig& config, const std::string& objective = "mlm");

/// Parameters of the whole model; the tied matrix counts once. 119,589,889 for the recipe at V = 32768.
[[nodiscard]] std::int64_t parameter_count(const ModelConfig& config, const std::string& objective = "mlm");

}  // namespace cram
