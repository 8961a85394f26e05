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

Embedding::Embedding(const ModelConfig& config, ParameterStore& store)
    : config_(config),
      store_(store),
      word_embedding_(store.add({.name = "encoder.embedding.word_embedding.weight",
                                 .global_shape = {config.vocab_size, config.hidden},
                                 .init = InitRule::kNormal,
                                 .init_value = kInitStddev,
                                 .decay = true,
                                 .fan_in = config.vocab_size})),
      scale_factor_(store.add({.name = "encoder.embedding.pos_embedding.scale_factor",
                               .global_shape = {1},
                               .init = InitRule::kConstant,
                               .init_value = 1 / std::sqrt(static_cast<double>(config.hidden)),
                               .decay = true,
                               .full_precision = true,
                               .fan_in = 1})),
      norm_("encoder.embedding.norm", config.hidden, store) {}

const at::Tensor& Embedding::position_table() {
  if (!position_table_.defined()) {
    position_table_ = sinusoidal_table(config_.seq_length, config_.hidden)
                          .to(at::TensorOptions().dtype(master_type(store_.precision())).device(store_.device()));
  }
  return position_table_;
}

at::Tensor Embedding::forward(const at::Tensor& ids, Saved* saved) {
  const std::int64_t batch = ids.size(0);
  const std::int64_t seq = ids.size(1);
  const at::Tensor flat_ids = ids.reshape({-1});  // [N]
  const at::Tensor& table = store_.weight(word_embedding_);
  const at::Tensor positions =
      (position_table().narrow(0, 0, seq) * store_.weight(scale_factor_)).to(table.scalar_type());
  const at::Tensor sum =
      at::index_select(table, 0, flat_ids).view({batch, seq, config_.hidden}).add_(positions).view({batch * seq, -1});
  if (saved == nullptr) return norm_.forward(sum, nullptr);
  saved->ids = flat_ids;
  saved->batch = batch;
  return norm_.forward(sum, &saved->norm);
}

void Embedding::backward(const at::Tensor& dy, const Saved& saved) {
  const at::Tensor d_sum = norm_.backward(dy, saved.norm);  // [N,H]
  kernels::scatter_add_rows(store_.grad(word_embedding_), saved.ids, d_sum, kPadId);
  const at::Tensor per_position = d_sum.view({saved.batch, -1, config_.hidden})
                                      .sum(0, /*keepdim=*/false, master_type(store_.precision()));  // [S',H]
  store_.grad(scale_factor_).add_((per_position * position_table().narrow(0, 0, per_position.size(0))).sum());
}

}  // namespace cram
