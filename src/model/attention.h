// Multi-head self-attention without bias and without mask (pretraining blocks are full). Tensor ranks share the heads.
#pragma once

#include "model/linear.h"
#include "model/model_config.h"

namespace cram {

class SelfAttention {
 public:
  struct Saved {
    at::Tensor x;        // [N,H]
    at::Tensor q, k, v;  // [B*heads,S,d]
    at::Tensor p;        // [B*heads,S,S] attention probabilities
    at::Tensor context;  // [N,H]
  };

  /// `name`.self_attention.query_key_value.weight [3H,H], rows grouped per head (q, k, v), and `name`.dense.weight
  /// [H,H].
  SelfAttention(const std::string& name, const ModelConfig& config, ParameterStore& store, Communicator& tensor);

  /// x [B*S,H] -> [B*S,H]
  [[nodiscard]] at::Tensor forward(const at::Tensor& x, std::int64_t batch, Saved* saved) const;
  [[nodiscard]] at::Tensor backward(const at::Tensor& dy, const Saved& saved) const;

 private:
  std::int64_t heads_, head_dim_;  // heads of this rank
  std::unique_ptr<Linear> query_key_value_, dense_;
};

}  // namespace cram
