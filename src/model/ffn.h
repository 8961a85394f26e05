// Gated feed-forward block: dense_out(gelu(gate) * value) with (value, gate) = halves of dense_in(x); no biases.
#pragma once

#include "model/linear.h"
#include "model/model_config.h"

namespace cram {

class GatedFfn {
 public:
  struct Saved {
    Linear::Saved dense_in, dense_out;
    at::Tensor u;  // [N,F]
  };

  /// `name`.dense_in.weight [F,H] and `name`.dense_out.weight [H,F/2].
  GatedFfn(const std::string& name, const ModelConfig& config, ParameterStore& store, const TensorRegion& tensor);

  [[nodiscard]] at::Tensor forward(const at::Tensor& x, Saved* saved) const;
  [[nodiscard]] at::Tensor backward(const at::Tensor& dy, const Saved& saved) const;

 private:
  std::unique_ptr<Linear> dense_in_, dense_out_;
};

}  // namespace cram
