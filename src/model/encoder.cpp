#include "model/encoder.h"

#include <torch/types.h>

#include <algorithm>

#include "base/check.h"
#include "base/profile.h"

namespace cram {

EncoderLayer::EncoderLayer(std::int64_t index, const ModelConfig& config, ParameterStore& store,
                           const TensorRegion& tensor)
    : index_(index),
      recompute_(config.recompute == "layer"),
      is_sparse_(index + 1 == config.layers && last_layer_is_sparse(config, tensor.size())),
      tensor_(tensor),
      norm1_(concat("encoder.layers.", index, ".norm1"), config.hidden, store, tensor.sequence_parallel()),
      attention_(concat("encoder.layers.", index, ".attn"), config, store, tensor),
      norm2_(concat("encoder.layers.", index, ".norm2"), config.hidden, store, tensor.sequence_parallel()),
      ffn_(concat("encoder.layers.", index, ".ffn"), config, store, tensor) {}

bool last_layer_is_sparse(const ModelConfig& config, int tensor_ranks) {
  return tensor_ranks == 1 && config.dropout == 0;
}

at::Tensor EncoderLayer::forward(const at::Tensor& x, const MicroBatch& batch, Saved* saved) const {
  const at::Tensor picks = saved != nullptr && picks_rows(batch) ? batch.picks : at::Tensor();
  if (saved == nullptr || !recompute_) return compute(x, batch, picks, saved);
  saved->input = x;
  return compute(x, batch, picks, nullptr);
}

at::Tensor EncoderLayer::compute(const at::Tensor& x, const MicroBatch& batch, const at::Tensor& picks,
                                 Saved* saved) const {
  const std::int64_t first_row = tensor_.first_row(x.size(0));
  const at::Tensor attended = attention_.forward(norm1_.forward(x, saved ? &saved->norm1 : nullptr), batch.fields,
                                                 picks, saved ? &saved->attention : nullptr);
  dropout_(attended, batch.dropout, index_, DropoutSite::kAttention, first_row);
  const at::Tensor beside = picks.defined() ? at::index_select(x, 0, picks) : x;
  const at::Tensor normed = norm2_.add_forward_(attended, beside, saved ? &saved->norm2 : nullptr);
  const at::Tensor y = ffn_.forward(normed, saved ? &saved->ffn : nullptr);
  dropout_(y, batch.dropout, index_, DropoutSite::kFfn, first_row);
  const Timed timed(Section::kElementwise);
  return y.add_(attended);
}

at::Tensor EncoderLayer::backward(const at::Tensor& dy, const MicroBatch& batch, const Saved& kept) const {
  Saved again;
  const at::Tensor picks = picks_rows(batch) ? batch.picks : at::Tensor();
  if (recompute_) (void)compute(kept.input, batch, picks, &again);
  const Saved& saved = recompute_ ? again : kept;
  const std::int64_t first_row = tensor_.first_row(dy.size(0));
  // The residual's gradient passes both branches unchanged and collects theirs.
  const auto through = [&](const at::Tensor& gradient, DropoutSite site) {
    if (batch.dropout.rate == 0) return gradient;
    const at::Tensor masked = gradient.clone();
    dropout_(masked, batch.dropout, index_, site, first_row);
    return masked;
  };
  const at::Tensor d_attended =
      norm2_.backward(ffn_.backward(through(dy, DropoutSite::kFfn), saved.ffn), saved.norm2, dy);
  const at::Tensor d_normed = attention_.backward(through(d_attended, DropoutSite::kAttention), saved.attention);
  const at::Tensor beside = picks.defined() ? kernels::put_rows(d_attended, picks, d_normed.size(0)) : d_attended;
  return norm1_.backward(d_normed, saved.norm1, beside);
}

namespace {

// The configuration itself, checked before a part is built from it.
const ModelConfig& shared_by(int tensor_ranks, const ModelConfig& config) {
  check_tensor_ranks(config, tensor_ranks);
  return config;
}

}  // namespace

Encoder::Encoder(const ModelConfig& config, ParameterStore& store, const Placement& placement)
    : config_(shared_by(placement.tensor.size(), config)),
      store_(store),
      place_(placement),
      ranges_(placement.blocks.empty() ? split_layers(config.layers, 1, "") : placement.blocks) {
  const TensorRegion& tensor = place_.tensor;
  const bool first = place_.stage == 0, last = place_.stage == place_.stages - 1;
  CRAM_DCHECK(blocks() % place_.stages == 0);
  // In the order of the whole model, so that one rank's flat buffers do not depend on this code's shape.
  if (first || last) {
    embedding_params_.first = store.size();
    word_embedding_ = add_word_embedding(config, store, tensor, /*tied=*/place_.stages > 1, /*counts=*/first);
    if (first) embedding_.emplace(config, word_embedding_, store, tensor);
    embedding_params_.end = store.size();
  }
  for (int block = place_.stage; block < blocks(); block += place_.stages) {
    Part& part = parts_.emplace_back();
    part.block = block;
    const BlockRange& range = ranges_[static_cast<std::size_t>(block)];
    for (std::int64_t i = range.first_layer; i < range.end_layer; ++i) {
      ParamRange params{store.size(), 0};
      part.layers.push_back(std::make_unique<EncoderLayer>(i, config, store, tensor));
      params.end = store.size();
      part.layer_params.push_back(params);
    }
  }
  final_norm_params_.first = store.size();
  if (last) final_norm_.emplace("encoder.final_norm", config.hidden, store, /*partial=*/false);
  final_norm_params_.end = store.size();
}

Encoder::Part& Encoder::part_of(int block) {
  const auto found = std::find_if(parts_.begin(), parts_.end(), [&](const Part& part) { return part.block == block; });
  CRAM_CHECK(found != parts_.end(), ExitCode::kOther, "block ", block, " of the model is on another rank");
  return *found;
}

at::Tensor Encoder::make_activation(std::int64_t batch, std::int64_t seq) const {
  return at::empty({place_.tensor.rows_held(batch * seq), config_.hidden},
                   at::TensorOptions().dtype(working_type(store_.precision())).device(store_.device()));
}

at::Tensor Encoder::forward_block(int block, const MicroBatch& batch, const at::Tensor& input, BlockSaved* saved) {
  const Part& part = part_of(block);
  at::Tensor x = input;
  if (block == 0) {
    const Timed timed(Section::kEmbedding);
    x = embedding_->forward(batch.fields[field::kIds], saved ? &saved->embedding : nullptr);
    dropout_(x, batch.dropout, -1, DropoutSite::kEmbedding, place_.tensor.first_row(x.size(0)));
  }
  if (saved != nullptr) saved->layers.resize(part.layers.size());
  for (std::size_t i = 0; i < part.layers.size(); ++i) {
    x = part.layers[i]->forward(x, batch, saved ? &saved->layers[i] : nullptr);
  }
  if (block + 1 < blocks()) return x;
  const bool picked = saved != nullptr && part.layers.back()->picks_rows(batch);
  if (!picked) {
    // LayerNorm works row by row, so rows are picked before it.
    x = place_.tensor.gather_rows(x);  // [N,H]
    if (saved != nullptr) saved->rows = x.size(0);
    if (batch.picks.defined()) x = at::index_select(x, 0, batch.picks);
  }
  return final_norm_->forward(x, saved ? &saved->final_norm : nullptr);
}

at::Tensor Encoder::backward_block(int block, const MicroBatch& batch, const at::Tensor& dy, BlockSaved& saved,
                                   const GradientsComplete& complete) {
  const Part& part = part_of(block);
  const auto report = [&](const ParamRange& params) {
    if (complete) complete(params.first, params.end);
  };
  at::Tensor dx = dy;
  if (block + 1 == blocks()) {
    dx = final_norm_->backward(dx, saved.final_norm);
    saved.final_norm = {};
    if (!part.layers.back()->picks_rows(batch)) {
      if (batch.picks.defined()) dx = kernels::put_rows(dx, batch.picks, saved.rows);
      dx = place_.tensor.own_rows(dx);
    }
    report(final_norm_params_);
    if (block > 0 && place_.stages > 1) report(embedding_params_);  // the second copy has no look-up to wait for
  }
  for (std::size_t i = part.layers.size(); i-- > 0;) {
    dx = part.layers[i]->backward(dx, batch, saved.layers[i]);
    saved.layers[i] = {};  // frees the layer's activations as soon as they are used
    report(part.layer_params[i]);
  }
  if (block > 0) return dx;
  if (batch.dropout.rate > 0) {
    dx = dx.clone();
    dropout_(dx, batch.dropout, -1, DropoutSite::kEmbedding, place_.tensor.first_row(dx.size(0)));
  }
  {
    const Timed timed(Section::kEmbedding);
    embedding_->backward(dx, saved.embedding);
  }
  report(embedding_params_);
  return {};
}

}  // namespace cram
