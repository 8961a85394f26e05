#include "model/positions.h"

#include <torch/types.h>

#include <cmath>

#include "base/check.h"

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

namespace {

// The recipe's: fixed sines and cosines times one learned scale, encoder.embedding.pos_embedding.scale_factor.
class ScaledSinusoids final : public PositionForm {
 public:
  ScaledSinusoids(const ModelConfig& config, ParameterStore& store, const TensorRegion& tensor)
      : seq_length_(config.seq_length),
        hidden_(config.hidden),
        store_(store),
        tensor_(tensor),
        scale_factor_(store.add({.name = "encoder.embedding.pos_embedding.scale_factor",
                                 .global_shape = {1},
                                 .init = InitRule::kConstant,
                                 .init_value = 1 / std::sqrt(static_cast<double>(config.hidden)),
                                 .traits = {.full_precision = true, .partial = tensor.sequence_parallel()}})) {}

  at::Tensor added(std::int64_t batch, std::int64_t seq) override {
    return rows(batch, seq) * store_.weight(scale_factor_);
  }

  void added_backward(const at::Tensor& d_sum, std::int64_t batch, std::int64_t seq) override {
    const at::ScalarType wide = master_type(store_.precision());
    if (tensor_.sequence_parallel()) {
      store_.grad(scale_factor_).add_((d_sum.to(wide) * rows(batch, seq)).sum());
      return;
    }
    const at::Tensor per_position = d_sum.view({batch, seq, hidden_}).sum(0, /*keepdim=*/false, wide);  // [S',H]
    store_.grad(scale_factor_).add_((per_position * rows(batch, seq)).sum());
  }

 private:
  // Rows of the table: of every position, or with sequence parallelism of this rank's rows of [B*S',H].
  at::Tensor rows(std::int64_t batch, std::int64_t seq) {
    if (!table_.defined()) {  // at first use, when the device is known
      table_ = sinusoidal_table(seq_length_, hidden_)
                   .to(at::TensorOptions().dtype(master_type(store_.precision())).device(store_.device()));
    }
    if (!tensor_.sequence_parallel()) return table_.narrow(0, 0, seq);
    const std::int64_t held = tensor_.rows_held(batch * seq), first = tensor_.first_row(held);
    const at::Tensor index =
        at::arange(first, first + held, at::TensorOptions().dtype(at::kLong).device(store_.device())).remainder_(seq);
    return at::index_select(table_, 0, index);
  }

  std::int64_t seq_length_, hidden_;
  const ParameterStore& store_;
  TensorRegion tensor_;
  ParamId scale_factor_;
  at::Tensor table_;  // [S,H] in the master format
};

void check_sinusoids(const ModelConfig& config) {
  CRAM_CHECK(config.hidden % 2 == 0, ExitCode::kUsage, "model.hidden=", config.hidden,
             " must be even (sine and cosine positions)");
}

template <class Form>
std::unique_ptr<PositionForm> make(const ModelConfig& config, ParameterStore& store, const TensorRegion& tensor) {
  return std::make_unique<Form>(config, store, tensor);
}

}  // namespace

Table<PositionRow>& position_forms() {
  static Table<PositionRow> table("position form", {{"sinusoidal", make<ScaledSinusoids>, check_sinusoids}});
  return table;
}

}  // namespace cram
