// Linear layers behind one table keyed by (structure, tensor-parallel style). A structure is one file; so far: dense.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "model/parameter_store.h"

namespace cram {

struct LinearSpec {
  std::string name;  ///< parameter name without ".weight"
  std::int64_t in = 0;
  std::int64_t out = 0;
  double init_stddev = 0.02;
};

/// y = x W^T without bias, W [out,in].
class Linear {
 public:
  virtual ~Linear() = default;
  Linear(const Linear&) = delete;
  Linear& operator=(const Linear&) = delete;

  /// x [N,in] -> [N,out]
  [[nodiscard]] virtual at::Tensor forward(const at::Tensor& x) const = 0;
  /// dy [N,out], the forward's x [N,in] -> dx [N,in]; adds to the weight's gradient.
  [[nodiscard]] virtual at::Tensor backward(const at::Tensor& dy, const at::Tensor& x) const = 0;
  /// The weight as one matrix [out,in], for tests of structures.
  [[nodiscard]] virtual at::Tensor materialize() const = 0;

 protected:
  Linear() = default;
};

/// Makes the layer and registers its parameters. Throws Error(kUsage) naming the supported pairs for any other.
[[nodiscard]] std::unique_ptr<Linear> make_linear(const std::string& structure, const std::string& tp_style,
                                                  const LinearSpec& spec, ParameterStore& store);

/// grad += dy^T x: the weight gradient of y = x W^T, accumulated in the gradient's own format.
void accumulate_weight_grad(const at::Tensor& grad, const at::Tensor& dy, const at::Tensor& x);

}  // namespace cram
