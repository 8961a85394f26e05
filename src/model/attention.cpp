#include "model/attention.h"

#include <torch/types.h>

#include <cmath>

namespace cram {

SelfAttention::SelfAttention(const std::string& name, const ModelConfig& config, ParameterStore& store,
                             const TensorRegion& tensor)
    : heads_(config.heads / tensor.size()),
      head_dim_(config.head_dim()),
      recompute_(config.recompute == "selective"),
      // Rows grouped per head, so a contiguous range of rows is whole heads.
      query_key_value_(make_linear(
          "dense", "column", {name + ".self_attention.query_key_value", config.hidden, 3 * config.hidden, kInitStddev},
          store, tensor)),
      dense_(make_linear("dense", "row", {name + ".dense", config.hidden, config.hidden, kInitStddev}, store, tensor)) {
}

at::Tensor SelfAttention::probabilities(const at::Tensor& q, const at::Tensor& k) const {
  const at::Tensor scores = at::bmm(q, k.transpose(1, 2)).mul_(1 / std::sqrt(static_cast<double>(head_dim_)));
  return at::softmax(scores, -1);  // [B*heads,S,S]
}

at::Tensor SelfAttention::forward(const at::Tensor& x, std::int64_t batch, Saved* saved) const {
  const at::Tensor qkv = query_key_value_->forward(x, saved ? &saved->query_key_value : nullptr);
  const std::int64_t seq = qkv.size(0) / batch;
  // [N,3H] = [B,S,heads,3,d] -> [3,B,heads,S,d]; the rows of the weight are grouped per head.
  const at::Tensor split = qkv.view({batch, seq, heads_, 3, head_dim_})
                               .permute({3, 0, 2, 1, 4})
                               .contiguous()
                               .view({3, batch * heads_, seq, head_dim_});
  const at::Tensor q = split[0], k = split[1], v = split[2];  // [B*heads,S,d]
  const at::Tensor p = probabilities(q, k);
  const at::Tensor context =
      at::bmm(p, v).view({batch, heads_, seq, head_dim_}).transpose(1, 2).reshape({batch * seq, heads_ * head_dim_});
  if (saved != nullptr) {
    saved->q = q;
    saved->k = k;
    saved->v = v;
    if (!recompute_) saved->p = p;
  }
  return dense_->forward(context, saved ? &saved->dense : nullptr);
}

at::Tensor SelfAttention::backward(const at::Tensor& dy, const Saved& saved) const {
  const std::int64_t seq = saved.q.size(1);
  const std::int64_t batch = saved.q.size(0) / heads_;
  const at::Tensor d_context = dense_->backward(dy, saved.dense)
                                   .view({batch, seq, heads_, head_dim_})
                                   .transpose(1, 2)
                                   .reshape({batch * heads_, seq, head_dim_});
  const at::Tensor p = saved.p.defined() ? saved.p : probabilities(saved.q, saved.k);
  const at::Tensor d_p = at::bmm(d_context, saved.v.transpose(1, 2));
  const at::Tensor d_scores =
      at::_softmax_backward_data(d_p, p, -1, p.scalar_type()).mul_(1 / std::sqrt(static_cast<double>(head_dim_)));
  const at::Tensor d_split = at::empty({3, batch * heads_, seq, head_dim_}, saved.q.options());
  at::Tensor d_q = d_split[0], d_k = d_split[1], d_v = d_split[2];
  at::bmm_out(d_q, d_scores, saved.k);
  at::bmm_out(d_k, d_scores.transpose(1, 2), saved.q);
  at::bmm_out(d_v, p.transpose(1, 2), d_context);
  const at::Tensor d_qkv = d_split.view({3, batch, heads_, seq, head_dim_})
                               .permute({1, 3, 2, 0, 4})
                               .reshape({batch * seq, 3 * heads_ * head_dim_});
  return query_key_value_->backward(d_qkv, saved.query_key_value);
}

}  // namespace cram
