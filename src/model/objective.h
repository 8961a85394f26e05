// What a model is trained for (train.objective): a head on the trunk's hidden states and a loss. An objective is one
// file and one row of the table.
//
// Legend: M rows of the hidden states that the loss looks at, H hidden, V vocabulary.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/batch.h"
#include "base/table.h"
#include "model/model_config.h"
#include "model/parameter_store.h"
#include "parallel/regions.h"

namespace cram {

/// What makes an objective; all outlive it. On the last pipeline stage only.
struct ObjectiveContext {
  const ModelConfig& config;
  ParameterStore& store;
  const TensorRegion& tensor;
  ParamId word_embedding;  ///< this rank's rows, for a tied decoder
};

/// Methods are collective over the tensor group: hidden states are whole on every tensor rank.
class Objective {
 public:
  /// What forward keeps for backward; an objective uses it as it likes.
  struct Saved {
    at::Tensor hidden;  // [M,H] as it was given
    std::vector<at::Tensor> more;
  };
  struct Evaluation {
    at::Tensor loss_sum;  // [] fp64
    at::Tensor correct;   // [] int64
  };

  virtual ~Objective() = default;
  Objective(const Objective&) = delete;
  Objective& operator=(const Objective&) = delete;

  /// Names of the batch fields that the loss looks at, beside those of the trunk (ids, lengths).
  [[nodiscard]] virtual std::vector<std::string_view> fields() const = 0;
  /// Rows [M] of the hidden states [B*S,H] that it wants, distinct; undefined: all of them. The trunk computes, and
  /// normalises, no more than these where it can.
  [[nodiscard]] virtual at::Tensor rows(const Batch& batch) const = 0;
  /// Terms of the loss sum: what the sum over a batch is divided by, once.
  [[nodiscard]] virtual std::int64_t count(const Batch& batch) const = 0;

  /// hidden [M,H] after the final norm -> the loss SUM, [] fp64 on the device.
  [[nodiscard]] virtual at::Tensor forward(const at::Tensor& hidden, const Batch& batch, Saved& saved) const = 0;
  /// The sum's gradient by hidden [M,H]; adds to the gradients of the head's own parameters. `saved` is used up.
  [[nodiscard]] virtual at::Tensor backward(const Batch& batch, Saved& saved) const = 0;
  /// Loss sum and correct predictions, no gradients.
  [[nodiscard]] virtual Evaluation evaluate(const at::Tensor& hidden, const Batch& batch) const = 0;
  /// hidden [M,H] -> the head's outputs [M,C], whole on every tensor rank: for predictions, never in training.
  [[nodiscard]] virtual at::Tensor outputs(const at::Tensor& hidden) const = 0;

 protected:
  Objective() = default;
};

/// Makes the objective and registers its own parameters, after the trunk's.
struct ObjectiveRow {
  std::string name;
  std::unique_ptr<Objective> (*make)(const ObjectiveContext&);
  /// FLOPs of the head's matrix products, forward, for one term of the loss; null: not worth counting.
  double (*flops)(const ModelConfig&) = nullptr;
};

/// The legal values of train.objective.
[[nodiscard]] Table<ObjectiveRow>& objectives();

}  // namespace cram
