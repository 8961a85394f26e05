// Multi-head self-attention without bias; nothing attends to padding. Tensor ranks share the heads.
#pragma once

#include "base/batch.h"
#include "model/kernels/kernels.h"
#include "model/linear.h"
#include "model/model_config.h"

namespace cram {

class SelfAttention {
 public:
  struct Saved {
    Linear::Saved query_key_value, dense;
    kernels::AttentionSettings settings;
    kernels::AttentionSaved core;
  };

  /// `name`.self_attention.query_key_value.weight [3H,H], rows grouped per head (q, k, v), and `name`.dense.weight
  /// [H,H].
  SelfAttention(const std::string& name, const ModelConfig& config, ParameterStore& store, const TensorRegion& tensor);

  /// x [B*S,H] of the batch's rows (and lengths, where it has them) -> [B*S,H] (rows shared out with sequence
  /// parallelism), or of the rows `picks` [M] alone, where defined: all rows are attended to, those attend. backward
  /// then takes [M,H] and returns [B*S,H]. With model.recompute = selective the S x S probabilities are not kept but
  /// made again in the backward pass, from the same inputs, so with the same bits (Korthikanti et al. 2022, section 5).
  [[nodiscard]] at::Tensor forward(const at::Tensor& x, const Batch& batch, const at::Tensor& picks,
                                   Saved* saved) const;
  [[nodiscard]] at::Tensor backward(const at::Tensor& dy, const Saved& saved) const;

 private:
  std::int64_t heads_, head_dim_;  // of this rank
  bool recompute_;
  std::unique_ptr<Linear> query_key_value_, dense_;
};

}  // namespace cram
