#include "model/embedding.h"

#include <torch/types.h>

#include <cmath>

namespace cram {

at::Tensor sinusoidal_table(std::int64_t seq_length, std::int64_t hidden) {
  at::Tensor table = at::empty({seq_length, hidden}, at::kDouble);
  auto* data = table.data_ptr<double>();
  for (std::int64_t s = 0; s < seq_length; ++s) {
    for (std::int64_t i = 0; i < hidden; i += 2) {
      const double angle =
          static_cast<double>(s) * std::pow(10000.0, -static_cast<double>(i) / static_cast<double>(hidden));
      data[s * hidden + i] = std::sin(angle);
      if (i + 1 < hidden) data[s * hidden + i + 1] = std::cos(angle);
    }
  }
  return table;
}

ParamId add_word_embedding(const ModelConfig& config, ParameterStore& store, const TensorRegion& tensor, bool tied,
                           bool counts) {
  const VocabularyRange range = vocabulary_range(config.vocab_size, tensor.rank(), tensor.size());
  return store.add({.name = "encoder.embedding.word_embedding.weight",
                    .global_shape = {config.vocab_size, config.hidden},
                    .init = InitRule::kNormal,
                    .init_value = kInitStddev,
                    .decay = true,
                    .fan_in = config.vocab_size,
                    .slice_begin = range.begin,
                    .slice_end = range.begin + range.rows,
                    .tied = tied,
                    .counts = counts});
}

Embedding::Embedding(const ModelConfig& config, ParamId word_embedding, ParameterStore& store,
                     const TensorRegion& tensor)
    : config_(config),
      store_(store),
      tensor_(tensor),
      range_(vocabulary_range(config.vocab_size, tensor.rank(), tensor.size())),
      word_embedding_(word_embedding),
      scale_factor_(store.add({.name = "encoder.embedding.pos_embedding.scale_factor",
                               .global_shape = {1},
                               .init = InitRule::kConstant,
                               .init_value = 1 / std::sqrt(static_cast<double>(config.hidden)),
                               .decay = true,
                               .full_precision = true,
                               .fan_in = 1,
                               .partial = tensor.sequence_parallel()})),
      norm_("encoder.embedding.norm", config.hidden, store, tensor.sequence_parallel()) {}

const at::Tensor& Embedding::position_table() {
  if (!position_table_.defined()) {
    position_table_ = sinusoidal_table(config_.seq_length, config_.hidden)
                          .to(at::TensorOptions().dtype(master_type(store_.precision())).device(store_.device()));
  }
  return position_table_;
}

// Rows of the table for this rank's rows of [B*S',H].
at::Tensor Embedding::positions_of_rows(std::int64_t rows, std::int64_t seq) {
  const std::int64_t first = tensor_.first_row(rows);
  const at::Tensor index =
      at::arange(first, first + rows, at::TensorOptions().dtype(at::kLong).device(store_.device())).remainder_(seq);
  return at::index_select(position_table(), 0, index);
}

at::Tensor Embedding::forward(const at::Tensor& ids, Saved* saved) {
  const std::int64_t batch = ids.size(0);
  const std::int64_t seq = ids.size(1);
  const at::Tensor& table = store_.weight(word_embedding_);   // [R,H]
  const at::Tensor local = ids.reshape({-1}) - range_.begin;  // [N]
  const at::Tensor own = local.ge(0).logical_and_(local.lt(range_.valid));
  // (Not at::where: its number would be copied to a GPU from pageable memory, which waits for the device.)
  at::Tensor sum = at::index_select(table, 0, local.masked_fill(own.logical_not(), 0));
  if (tensor_.size() > 1) {
    sum.mul_(own.unsqueeze(1));
    sum = tensor_.leave_(sum);  // exact: all but one of the terms are 0
  }
  const at::Tensor positions =  // [S',H], for every row of the batch, or [N/t,H]
      tensor_.sequence_parallel() ? positions_of_rows(sum.size(0), seq) : position_table().narrow(0, 0, seq);
  const at::Tensor scaled = (positions * store_.weight(scale_factor_)).to(table.scalar_type());
  if (saved == nullptr) return norm_.add_forward_(sum, scaled, nullptr);
  saved->rows =
      local.masked_fill(own.logical_not().logical_or_(ids.reshape({-1}).eq(static_cast<std::int64_t>(kPadId))), -1);
  saved->batch = batch;
  return norm_.add_forward_(sum, scaled, &saved->norm);
}

void Embedding::backward(const at::Tensor& dy, const Saved& saved) {
  const at::Tensor d_sum = norm_.backward(dy, saved.norm);  // [N or N/t,H]
  kernels::scatter_add_rows(store_.grad(word_embedding_), saved.rows, tensor_.leave_backward(d_sum), /*skip_id=*/-1);
  if (tensor_.sequence_parallel()) {
    const std::int64_t seq = saved.rows.size(0) / saved.batch;
    store_.grad(scale_factor_)
        .add_((d_sum.to(master_type(store_.precision())) * positions_of_rows(d_sum.size(0), seq)).sum());
    return;
  }
  const at::Tensor per_position = d_sum.view({saved.batch, -1, config_.hidden})
                                      .sum(0, /*keepdim=*/false, master_type(store_.precision()));  // [S',H]
  store_.grad(scale_factor_).add_((per_position * position_table().narrow(0, 0, per_position.size(0))).sum());
}

}  // namespace cram
