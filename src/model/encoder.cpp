#include "model/encoder.h"

#include <torch/types.h>

#include <algorithm>

#include "base/check.h"
#include "base/profile.h"

namespace cram {
namespace {

// The sizes of a tensor group that can share this model, for messages: divisors of both heads and half of the FFN.
std::string legal_tensor_sizes(const ModelConfig& config) {
  std::string sizes;
  for (std::int64_t size = 1; size <= config.heads; ++size) {
    if (config.heads % size == 0 && config.ffn / 2 % size == 0) sizes += concat(sizes.empty() ? "" : ", ", size);
  }
  return sizes;
}

const ModelConfig& checked(const ModelConfig& config, const TensorRegion& tensor) {
  CRAM_CHECK(config.heads % tensor.size() == 0 && config.ffn / 2 % tensor.size() == 0, ExitCode::kUsage,
             "parallel.tensor=", tensor.size(), " cannot share model.heads=", config.heads,
             " and model.ffn=", config.ffn, "; legal sizes: ", legal_tensor_sizes(config));
  return config;
}

}  // namespace

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
  const at::Tensor picks = saved != nullptr && is_sparse_ ? batch.positions : at::Tensor();
  if (saved == nullptr || !recompute_) return compute(x, batch, picks, saved);
  saved->input = x;
  return compute(x, batch, picks, nullptr);
}

at::Tensor EncoderLayer::compute(const at::Tensor& x, const MicroBatch& batch, const at::Tensor& picks,
                                 Saved* saved) const {
  const std::int64_t rows = batch.ids.size(0), first_row = tensor_.first_row(x.size(0));
  const at::Tensor attended = attention_.forward(norm1_.forward(x, saved ? &saved->norm1 : nullptr), rows, picks,
                                                 saved ? &saved->attention : nullptr);
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
  if (recompute_) (void)compute(kept.input, batch, is_sparse_ ? batch.positions : at::Tensor(), &again);
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
  const at::Tensor beside = is_sparse_ ? kernels::put_rows(d_attended, batch.positions, d_normed.size(0)) : d_attended;
  return norm1_.backward(d_normed, saved.norm1, beside);
}

Encoder::Encoder(const ModelConfig& config, ParameterStore& store, const Placement& placement)
    : config_(checked(config, placement.tensor)),
      store_(store),
      place_(placement),
      ranges_(placement.blocks.empty() ? split_layers(config.layers, 1, "") : placement.blocks),
      vocabulary_(vocabulary_range(config.vocab_size, place_.tensor.rank(), place_.tensor.size())) {
  const TensorRegion& tensor = place_.tensor;
  const int stages = place_.stages(), stage = place_.stage();
  const bool first = stage == 0, last = stage == stages - 1;
  CRAM_DCHECK(blocks() % stages == 0);
  ParamId word_embedding = 0;
  // In the order of the whole model, so that one rank's flat buffers do not depend on this code's shape.
  if (first || last) {
    embedding_params_.first = store.size();
    word_embedding = add_word_embedding(config, store, tensor, /*tied=*/stages > 1, /*counts=*/first);
    if (first) embedding_.emplace(config, word_embedding, store, tensor);
    embedding_params_.end = store.size();
  }
  for (int block = stage; block < blocks(); block += stages) {
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
  head_params_.first = store.size();
  if (last) head_.emplace(config, word_embedding, store, tensor);
  head_params_.end = store.size();
}

Encoder::Encoder(const ModelConfig& config, ParameterStore& store, Communicator& tensor)
    : Encoder(config, store, Placement{tensor, nullptr, {}}) {}

Encoder::Encoder(const ModelConfig& config, ParameterStore& store) : Encoder(config, store, make_self_communicator()) {}

Encoder::Encoder(const ModelConfig& config, ParameterStore& store, std::unique_ptr<Communicator> alone)
    : Encoder(config, store, *alone) {
  alone_ = std::move(alone);
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

at::Tensor Encoder::forward_block(int block, const MicroBatch& batch, const at::Tensor& input, BlockSaved& saved) {
  const Part& part = part_of(block);
  at::Tensor x = input;
  if (block == 0) {
    const Timed timed(Section::kEmbedding);
    x = embedding_->forward(batch.ids, &saved.embedding);
    dropout_(x, batch.dropout, -1, DropoutSite::kEmbedding, place_.tensor.first_row(x.size(0)));
  }
  saved.layers.resize(part.layers.size());
  for (std::size_t i = 0; i < part.layers.size(); ++i) x = part.layers[i]->forward(x, batch, &saved.layers[i]);
  if (block + 1 < blocks()) return x;
  const bool picked = !part.layers.empty() && part.layers.back()->is_sparse();
  saved.d_logits = head_->logits(x, picked ? at::Tensor() : batch.positions, &saved.head);  // [M,R]
  const Timed timed(Section::kLoss);
  saved.loss_sum = vocabulary_cross_entropy_(saved.d_logits, batch.labels, /*write_gradient=*/true, vocabulary_,
                                             place_.tensor.group())
                       .loss_sum;
  return {};
}

at::Tensor Encoder::backward_block(int block, const MicroBatch& batch, const at::Tensor& dy, BlockSaved& saved,
                                   const GradientsComplete& complete) {
  const Part& part = part_of(block);
  const auto report = [&](const ParamRange& params) {
    if (complete) complete(params.first, params.end);
  };
  at::Tensor dx = dy;
  if (block + 1 == blocks()) {
    dx = head_->backward(saved.d_logits, saved.head);
    saved.d_logits = at::Tensor();
    saved.head = {};
    report(head_params_);
    if (block > 0 && place_.stages() > 1) report(embedding_params_);  // the second copy has no look-up to wait for
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

at::Tensor Encoder::forward_backward(const at::Tensor& ids, const at::Tensor& positions, const at::Tensor& labels) {
  const MicroBatch batch{ids, positions, labels, {}};
  std::vector<BlockSaved> saved(static_cast<std::size_t>(blocks()));
  at::Tensor x;
  for (int b = 0; b < blocks(); ++b) x = forward_block(b, batch, x, saved[static_cast<std::size_t>(b)]);
  for (int b = blocks(); b-- > 0;) x = backward_block(b, batch, x, saved[static_cast<std::size_t>(b)], {});
  return saved.back().loss_sum;
}

at::Tensor Encoder::trunk(const at::Tensor& given) {
  // Sequence parallelism needs rows that the tensor ranks can share out; whole repeated rows change nothing for the
  // first ones (an odd sentence, the last rows of an evaluation).
  const bool uneven = place_.tensor.sequence_parallel() && given.numel() % place_.tensor.size() != 0;
  const at::Tensor ids = uneven ? given.repeat({place_.tensor.size(), 1}) : given;
  const MicroBatch batch{ids, {}, {}, {}};
  at::Tensor x;
  for (int block = 0; block < blocks(); ++block) {
    const int owner = block % place_.stages();
    if (owner != place_.stage()) continue;
    if (block == 0) {
      x = embedding_->forward(ids, nullptr);
    } else if (place_.stages() > 1) {
      x = make_activation(ids.size(0), ids.size(1));
      place_.pipeline->recv_(x, (block - 1) % place_.stages());
    }
    for (const auto& layer : part_of(block).layers) x = layer->forward(x, batch, nullptr);
    if (block + 1 < blocks() && place_.stages() > 1) place_.pipeline->send(x, (block + 1) % place_.stages());
  }
  return has_head() ? x : at::Tensor();
}

Encoder::Evaluation Encoder::evaluate(const at::Tensor& ids, const at::Tensor& positions, const at::Tensor& labels) {
  const at::Tensor hidden = trunk(ids);
  if (!has_head()) {
    const at::TensorOptions on_device = at::TensorOptions().device(store_.device());
    return {at::zeros({}, on_device.dtype(at::kDouble)), at::zeros({}, on_device.dtype(at::kLong))};
  }
  const kernels::CrossEntropy result =
      vocabulary_cross_entropy_(head_->logits(hidden, positions, nullptr), labels,
                                /*write_gradient=*/false, vocabulary_, place_.tensor.group());
  return {result.loss_sum, result.correct};
}

at::Tensor Encoder::from_last_stage(at::Tensor made, const std::vector<std::int64_t>& shape) {
  if (place_.stages() == 1) return made;
  if (!made.defined()) {
    made = at::empty(shape, at::TensorOptions().dtype(working_type(store_.precision())).device(store_.device()));
  }
  made = made.contiguous();
  place_.pipeline->broadcast_(made, place_.stages() - 1);
  return made;
}

at::Tensor Encoder::logits(const at::Tensor& ids, const at::Tensor& positions) {
  const at::Tensor last = trunk(ids);
  at::Tensor made;
  if (has_head()) {
    made = gather_logits(head_->logits(last, positions, nullptr), config_.vocab_size, place_.tensor.group());
  }
  return from_last_stage(made, {positions.size(0), config_.vocab_size});
}

at::Tensor Encoder::hidden(const at::Tensor& ids) {
  const at::Tensor last = trunk(ids);
  at::Tensor made;
  if (has_head()) made = head_->normed(last).narrow(0, 0, ids.numel()).view({ids.size(0), ids.size(1), -1});
  return from_last_stage(made, {ids.size(0), ids.size(1), config_.hidden});
}

std::set<std::string> parameter_names(const ModelConfig& config) {
  ParameterStore store;
  const Encoder whole(config, store);
  std::set<std::string> names;
  for (ParamId id = 0; id < store.size(); ++id) names.insert(store.spec(id).name);
  return names;
}

}  // namespace cram
