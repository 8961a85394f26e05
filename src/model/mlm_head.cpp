#include "model/mlm_head.h"

#include <torch/types.h>

#include "model/linear.h"

namespace cram {

MlmHead::MlmHead(const ModelConfig& config, ParamId tied_embedding, ParameterStore& store, const TensorRegion& tensor)
    : store_(store),
      tensor_(tensor),
      tied_embedding_(tied_embedding),
      final_norm_("encoder.final_norm", config.hidden, store, /*partial=*/false) {}

at::Tensor MlmHead::logits(const at::Tensor& hidden, const at::Tensor& positions, Saved* saved) const {
  const at::Tensor whole = tensor_.gather_rows(hidden);             // [N,H]
  const at::Tensor picked = at::index_select(whole, 0, positions);  // [M,H]
  if (saved == nullptr) return cram::matmul(final_norm_.forward(picked, nullptr), store_.weight(tied_embedding_));
  saved->positions = positions;
  saved->rows = whole.size(0);
  saved->normed = final_norm_.forward(picked, &saved->norm);
  return cram::matmul(saved->normed, store_.weight(tied_embedding_));
}

at::Tensor MlmHead::backward(const at::Tensor& d_logits, const Saved& saved) const {
  const at::Tensor d_normed = matmul_backward(d_logits, store_.weight(tied_embedding_));  // [M,H], this rank's part
  Work sum = tensor_.group().all_reduce_async_(d_normed);
  accumulate_weight_grad(store_.grad(tied_embedding_), d_logits, saved.normed);
  sum.wait();
  const at::Tensor d_picked = final_norm_.backward(d_normed, saved.norm);
  const at::Tensor d_hidden = at::zeros({saved.rows, d_picked.size(1)}, d_picked.options());
  // Positions are distinct, so the sum order cannot matter.
  d_hidden.index_copy_(0, saved.positions, d_picked);
  return tensor_.own_rows(d_hidden);
}

}  // namespace cram
