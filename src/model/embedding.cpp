#include "model/embedding.h"

#include <torch/types.h>

namespace cram {

ParamId add_word_embedding(const ModelConfig& config, ParameterStore& store, const TensorRegion& tensor, bool tied,
                           bool counts) {
  const VocabularyRange range = vocabulary_range(config.vocab_size, tensor.rank(), tensor.size());
  return store.add({.name = "encoder.embedding.word_embedding.weight",
                    .global_shape = {config.vocab_size, config.hidden},
                    .init = InitRule::kNormal,
                    .init_value = kInitStddev,
                    .traits = {.tied = tied, .counts = counts},
                    .slice_begin = range.begin,
                    .slice_end = range.begin + range.rows});
}

Embedding::Embedding(const ModelConfig& config, ParamId word_embedding, ParameterStore& store,
                     const TensorRegion& tensor)
    : store_(store),
      tensor_(tensor),
      range_(vocabulary_range(config.vocab_size, tensor.rank(), tensor.size())),
      word_embedding_(word_embedding),
      positions_(position_forms().at(config.positions).make(config, store, tensor)),
      norm_("encoder.embedding.norm", config.hidden, store, tensor.sequence_parallel()) {}

at::Tensor Embedding::forward(const at::Tensor& ids, Saved* saved) {
  const std::int64_t batch = ids.size(0), seq = ids.size(1);
  const at::Tensor& table = store_.weight(word_embedding_);   // [R,H]
  const at::Tensor local = ids.reshape({-1}) - range_.begin;  // [N]
  const at::Tensor own = local.ge(0).logical_and_(local.lt(range_.valid));
  // (Not at::where: its number would be copied to a GPU from pageable memory, which waits for the device.)
  at::Tensor sum = at::index_select(table, 0, local.masked_fill(own.logical_not(), 0));
  if (tensor_.size() > 1) {
    sum.mul_(own.unsqueeze(1));
    sum = tensor_.leave_(sum);  // exact: all but one of the terms are 0
  }
  const at::Tensor positions = positions_->added(batch, seq);
  if (saved != nullptr) {
    saved->rows =
        local.masked_fill(own.logical_not().logical_or_(ids.reshape({-1}).eq(static_cast<std::int64_t>(kPadId))), -1);
    saved->batch = batch;
  }
  LayerNorm::Saved* norm = saved != nullptr ? &saved->norm : nullptr;
  return positions.defined() ? norm_.add_forward_(sum, positions.to(table.scalar_type()), norm)
                             : norm_.forward(sum, norm);
}

void Embedding::backward(const at::Tensor& dy, const Saved& saved) {
  const at::Tensor d_sum = norm_.backward(dy, saved.norm);  // [N or N/t,H]
  kernels::scatter_add_rows(store_.grad(word_embedding_), saved.rows, tensor_.leave_backward(d_sum), /*skip_id=*/-1);
  positions_->added_backward(d_sum, saved.batch, saved.rows.size(0) / saved.batch);
}

}  // namespace cram
