#include "model/ffn.h"

#include <torch/types.h>

#include "base/profile.h"
#include "model/kernels/kernels.h"

namespace cram {

GatedFfn::GatedFfn(const std::string& name, const ModelConfig& config, ParameterStore& store,
                   const TensorRegion& tensor)
    // Value and gate are cut separately: a rank needs both halves of the same columns.
    : dense_in_(make_linear(config.structure, LinearStyle::kColumn,
                            {name + ".dense_in", config.hidden, config.ffn, kInitStddev, 2}, store, tensor)),
      dense_out_(make_linear(config.structure, LinearStyle::kRow,
                             {name + ".dense_out", config.ffn / 2, config.hidden, kInitStddev}, store, tensor)) {}

at::Tensor GatedFfn::forward(const at::Tensor& x, Saved* saved) const {
  const at::Tensor u = dense_in_->forward(x, saved ? &saved->dense_in : nullptr);
  if (saved != nullptr) saved->u = u;
  at::Tensor gated;
  {
    const Timed timed(Section::kElementwise);
    gated = kernels::geglu(u);
  }
  return dense_out_->forward(gated, saved ? &saved->dense_out : nullptr);
}

at::Tensor GatedFfn::backward(const at::Tensor& dy, const Saved& saved) const {
  const at::Tensor d_g = dense_out_->backward(dy, saved.dense_out);
  at::Tensor d_u;
  {
    const Timed timed(Section::kElementwise);
    d_u = kernels::geglu_backward(d_g, saved.u);
  }
  return dense_in_->backward(d_u, saved.dense_in);
}

}  // namespace cram
