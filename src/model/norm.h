// LayerNorm with weight and bias, eps 1e-12, in full precision whatever the working format.
#pragma once

#include <string>

#include "model/kernels/kernels.h"
#include "model/model_config.h"
#include "model/parameter_store.h"

namespace cram {

class LayerNorm {
 public:
  struct Saved {
    at::Tensor x;  // [N,H]
    kernels::NormOutput norm;
  };

  /// Registers `name`.weight and `name`.bias; neither decays. `partial`: it sees only this rank's rows, so its
  /// gradients are summed over the tensor ranks.
  LayerNorm(const std::string& name, std::int64_t hidden, ParameterStore& store, bool partial);

  /// x [N,H] -> [N,H]; fills `saved` when given (training).
  [[nodiscard]] at::Tensor forward(const at::Tensor& x, Saved* saved) const;
  /// x += branch in place, then forward of the sum.
  [[nodiscard]] at::Tensor add_forward_(const at::Tensor& x, const at::Tensor& branch, Saved* saved) const;
  /// dy [N,H] -> dx [N,H], plus `residual` where defined; adds to the parameters' gradients.
  [[nodiscard]] at::Tensor backward(const at::Tensor& dy, const Saved& saved,
                                    const at::Tensor& residual = at::Tensor()) const;

 private:
  [[nodiscard]] static at::Tensor keep(const at::Tensor& x, kernels::NormOutput out, Saved* saved);
  const ParameterStore& store_;
  ParamId weight_, bias_;
};

}  // namespace cram
