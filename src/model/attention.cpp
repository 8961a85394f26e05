#include "model/attention.h"

#include <torch/types.h>

#include "base/profile.h"

namespace cram {

SelfAttention::SelfAttention(const std::string& name, const ModelConfig& config, ParameterStore& store,
                             const TensorRegion& tensor)
    : heads_(config.heads / tensor.size()),
      head_dim_(config.head_dim()),
      recompute_(config.recompute == "selective"),
      // Rows grouped per head, so a contiguous range of rows is whole heads.
      query_key_value_(make_linear(
          config.structure, LinearStyle::kColumn,
          {name + ".self_attention.query_key_value", config.hidden, 3 * config.hidden, kInitStddev}, store, tensor)),
      dense_(make_linear(config.structure, LinearStyle::kRow,
                         {name + ".dense", config.hidden, config.hidden, kInitStddev}, store, tensor)) {}

at::Tensor SelfAttention::forward(const at::Tensor& x, const Batch& batch, const at::Tensor& picks,
                                  Saved* saved) const {
  const kernels::AttentionSettings settings{.batch = batch.rows,
                                            .heads = heads_,
                                            .head_dim = head_dim_,
                                            .keep_probabilities = !recompute_,
                                            .lengths = batch.find(field::kLengths)};
  const at::Tensor qkv = query_key_value_->forward(x, saved ? &saved->query_key_value : nullptr);
  at::Tensor context;
  {
    const Timed timed(Section::kAttention);
    context = kernels::attention(qkv, settings, saved ? &saved->core : nullptr, picks);
  }
  if (saved != nullptr) saved->settings = settings;
  return dense_->forward(context, saved ? &saved->dense : nullptr);
}

at::Tensor SelfAttention::backward(const at::Tensor& dy, const Saved& saved) const {
  const at::Tensor d_context = dense_->backward(dy, saved.dense);
  at::Tensor d_qkv;
  {
    const Timed timed(Section::kAttention);
    d_qkv = kernels::attention_backward(d_context, saved.settings, saved.core);
  }
  return query_key_value_->backward(d_qkv, saved.query_key_value);
}

}  // namespace cram
