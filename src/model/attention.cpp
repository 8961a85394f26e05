#include "model/attention.h"

#include <torch/types.h>

#include "base/profile.h"

namespace cram {

SelfAttention::SelfAttention(const std::string& name, const ModelConfig& config, ParameterStore& store,
                             const TensorRegion& tensor)
    : heads_(config.heads / tensor.size()),
      recompute_(config.recompute == "selective"),
      // Rows grouped per head, so a contiguous range of rows is whole heads.
      query_key_value_(make_linear(
          "dense", "column", {name + ".self_attention.query_key_value", config.hidden, 3 * config.hidden, kInitStddev},
          store, tensor)),
      dense_(make_linear("dense", "row", {name + ".dense", config.hidden, config.hidden, kInitStddev}, store, tensor)) {
}

at::Tensor SelfAttention::forward(const at::Tensor& x, std::int64_t batch, const at::Tensor& picks,
                                  Saved* saved) const {
  const at::Tensor qkv = query_key_value_->forward(x, saved ? &saved->query_key_value : nullptr);
  at::Tensor context;
  {
    const Timed timed(Section::kAttention);
    context = kernels::attention(qkv, batch, heads_, !recompute_, saved ? &saved->core : nullptr, picks);
  }
  if (saved != nullptr) saved->batch = batch;
  return dense_->forward(context, saved ? &saved->dense : nullptr);
}

at::Tensor SelfAttention::backward(const at::Tensor& dy, const Saved& saved) const {
  const at::Tensor d_context = dense_->backward(dy, saved.dense);
  at::Tensor d_qkv;
  {
    const Timed timed(Section::kAttention);
    d_qkv = kernels::attention_backward(d_context, saved.batch, heads_, saved.core);
  }
  return query_key_value_->backward(d_qkv, saved.query_key_value);
}

}  // namespace cram
