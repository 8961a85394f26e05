// How a model knows where a token stands (model.positions): a form is one file and one row of the table.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "base/table.h"
#include "model/model_config.h"
#include "model/parameter_store.h"
#include "parallel/regions.h"

namespace cram {

class PositionForm {
 public:
  virtual ~PositionForm() = default;
  PositionForm(const PositionForm&) = delete;
  PositionForm& operator=(const PositionForm&) = delete;

  /// What is added to the word embeddings of a micro-batch of `batch` rows of `seq` tokens, before their norm, in the
  /// master format: [seq,H], the same for every row; with sequence parallelism [batch*seq/t,H], this rank's rows.
  /// Undefined: nothing is added.
  [[nodiscard]] virtual at::Tensor added(std::int64_t batch, std::int64_t seq) = 0;
  /// d_sum [N or N/t,H], the gradient of the sum it was added to: adds to this form's own gradients.
  virtual void added_backward(const at::Tensor& d_sum, std::int64_t batch, std::int64_t seq) = 0;

 protected:
  PositionForm() = default;
};

/// Makes the form and registers its parameters, after the word embedding and before the norm.
struct PositionRow {
  std::string name;
  std::unique_ptr<PositionForm> (*make)(const ModelConfig&, ParameterStore&, const TensorRegion&);
  /// Throws Error(kUsage) where the form cannot do that model; null: it can do all.
  void (*check)(const ModelConfig&) = nullptr;
};

/// The legal values of model.positions.
[[nodiscard]] Table<PositionRow>& position_forms();

/// PE[s,2i] = sin(s * 10000^(-2i/H)), PE[s,2i+1] = cos(same), fp64 (Vaswani et al. 2017, section 3.5).
[[nodiscard]] at::Tensor sinusoidal_table(std::int64_t seq_length, std::int64_t hidden);

}  // namespace cram
