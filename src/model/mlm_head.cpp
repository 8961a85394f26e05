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
  const at::Tensor whole = tensor_.gather_rows(hidden);                                           // [N,H]
  const at::Tensor picked = positions.defined() ? at::index_select(whole, 0, positions) : whole;  // [M,H]
  if (saved == nullptr) return matmul(final_norm_.forward(picked, nullptr), store_.weight(tied_embedding_), panels_);
  saved->positions = positions;
  saved->rows = whole.size(0);
  saved->normed = final_norm_.forward(picked, &saved->norm);
  return matmul(saved->normed, store_.weight(tied_embedding_), panels_);
}

at::Tensor MlmHead::backward(const at::Tensor& d_logits, const Saved& saved) const {
  const at::Tensor d_normed =
      matmul_backward(d_logits, store_.weight(tied_embedding_), panels_);  // [M,H], this rank's part
  Work sum = tensor_.group().all_reduce_async_(d_normed);
  accumulate_weight_grad(store_.grad(tied_embedding_), d_logits, saved.normed);
  sum.wait();
  const at::Tensor d_picked = final_norm_.backward(d_normed, saved.norm);
  if (!saved.positions.defined()) return d_picked;
  return tensor_.own_rows(kernels::put_rows(d_picked, saved.positions, saved.rows));
}

}  // namespace cram
