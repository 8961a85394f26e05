#include "model/norm.h"

#include <torch/types.h>

#include "base/profile.h"

namespace cram {
namespace {

ParamId add_norm_parameter(const std::string& name, std::int64_t hidden, double value, ParameterStore& store,
                           bool partial) {
  return store.add({.name = name,
                    .global_shape = {hidden},
                    .init = InitRule::kConstant,
                    .init_value = value,
                    .traits = {.decay = false, .full_precision = true, .partial = partial}});
}

}  // namespace

LayerNorm::LayerNorm(const std::string& name, std::int64_t hidden, ParameterStore& store, bool partial)
    : store_(store),
      weight_(add_norm_parameter(name + ".weight", hidden, 1, store, partial)),
      bias_(add_norm_parameter(name + ".bias", hidden, 0, store, partial)) {}

at::Tensor LayerNorm::keep(const at::Tensor& x, kernels::NormOutput out, Saved* saved) {
  const at::Tensor y = out.y;
  if (saved != nullptr) {
    out.y = at::Tensor();  // the consumer keeps what it needs of y
    *saved = {x, out};
  }
  return y;
}

at::Tensor LayerNorm::forward(const at::Tensor& x, Saved* saved) const {
  const Timed timed(Section::kNorm);
  return keep(x, kernels::layer_norm(x, store_.weight(weight_), store_.weight(bias_), kLayerNormEps), saved);
}

at::Tensor LayerNorm::add_forward_(const at::Tensor& x, const at::Tensor& branch, Saved* saved) const {
  const Timed timed(Section::kNorm);
  return keep(x, kernels::add_layer_norm_(x, branch, store_.weight(weight_), store_.weight(bias_), kLayerNormEps),
              saved);
}

at::Tensor LayerNorm::backward(const at::Tensor& dy, const Saved& saved, const at::Tensor& residual) const {
  const Timed timed(Section::kNorm);
  return kernels::layer_norm_backward(dy, saved.x, saved.norm, store_.weight(weight_), store_.weight(bias_),
                                      store_.grad(weight_), store_.grad(bias_), residual);
}

}  // namespace cram
