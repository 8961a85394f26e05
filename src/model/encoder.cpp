#include "model/encoder.h"

#include <torch/types.h>

#include "base/check.h"

namespace cram {
namespace {

std::vector<std::unique_ptr<EncoderLayer>> make_layers(const ModelConfig& config, ParameterStore& store,
                                                       Communicator& tensor) {
  std::vector<std::unique_ptr<EncoderLayer>> layers;
  for (std::int64_t i = 0; i < config.layers; ++i) {
    layers.push_back(std::make_unique<EncoderLayer>(concat("encoder.layers.", i), config, store, tensor));
  }
  return layers;
}

// The sizes of a tensor group that can share this model, for messages: divisors of both heads and half of the FFN.
std::string legal_tensor_sizes(const ModelConfig& config) {
  std::string sizes;
  for (std::int64_t size = 1; size <= config.heads; ++size) {
    if (config.heads % size == 0 && config.ffn / 2 % size == 0) sizes += concat(sizes.empty() ? "" : ", ", size);
  }
  return sizes;
}

const ModelConfig& checked(const ModelConfig& config, const Communicator& tensor) {
  CRAM_CHECK(config.heads % tensor.size() == 0 && config.ffn / 2 % tensor.size() == 0, ExitCode::kUsage,
             "parallel.tensor=", tensor.size(), " cannot share model.heads=", config.heads,
             " and model.ffn=", config.ffn, "; legal sizes: ", legal_tensor_sizes(config));
  return config;
}

}  // namespace

EncoderLayer::EncoderLayer(const std::string& name, const ModelConfig& config, ParameterStore& store,
                           Communicator& tensor)
    : norm1_(name + ".norm1", config.hidden, store),
      attention_(name + ".attn", config, store, tensor),
      norm2_(name + ".norm2", config.hidden, store),
      ffn_(name + ".ffn", config, store, tensor) {}

at::Tensor EncoderLayer::forward(const at::Tensor& x, std::int64_t batch, Saved* saved) const {
  const at::Tensor attended =
      attention_.forward(norm1_.forward(x, saved ? &saved->norm1 : nullptr), batch, saved ? &saved->attention : nullptr)
          .add_(x);
  return ffn_.forward(norm2_.forward(attended, saved ? &saved->norm2 : nullptr), saved ? &saved->ffn : nullptr)
      .add_(attended);
}

at::Tensor EncoderLayer::backward(const at::Tensor& dy, const Saved& saved) const {
  // The residual's gradient passes both branches unchanged and collects theirs.
  const at::Tensor d_attended = norm2_.backward(ffn_.backward(dy, saved.ffn), saved.norm2).add_(dy);
  return norm1_.backward(attention_.backward(d_attended, saved.attention), saved.norm1).add_(d_attended);
}

Encoder::Encoder(const ModelConfig& config, ParameterStore& store, Communicator& tensor)
    : config_(checked(config, tensor)),
      tensor_(tensor),
      embedding_(config, store, tensor),
      layers_(make_layers(config, store, tensor)),
      head_(config, embedding_.word_embedding(), store, tensor) {}

Encoder::Encoder(const ModelConfig& config, ParameterStore& store) : Encoder(config, store, make_self_communicator()) {}

Encoder::Encoder(const ModelConfig& config, ParameterStore& store, std::unique_ptr<Communicator> alone)
    : Encoder(config, store, *alone) {
  alone_ = std::move(alone);
}

at::Tensor Encoder::forward_backward(const at::Tensor& ids, const at::Tensor& positions, const at::Tensor& labels) {
  Embedding::Saved embedding_saved;
  std::vector<EncoderLayer::Saved> saved(layers_.size());
  at::Tensor x = embedding_.forward(ids, &embedding_saved);  // [N,H]
  for (std::size_t i = 0; i < layers_.size(); ++i) x = layers_[i]->forward(x, ids.size(0), &saved[i]);
  MlmHead::Saved head_saved;
  const at::Tensor logits = head_.logits(x, positions, &head_saved);  // [M,R]
  const at::Tensor loss_sum =
      vocabulary_cross_entropy_(logits, labels, /*write_gradient=*/true, embedding_.range(), tensor_).loss_sum;

  at::Tensor dx = head_.backward(logits, head_saved);
  for (std::size_t i = layers_.size(); i-- > 0;) {
    dx = layers_[i]->backward(dx, saved[i]);
    saved[i] = {};  // frees the layer's activations as soon as they are used
  }
  embedding_.backward(dx, embedding_saved);
  return loss_sum;
}

at::Tensor Encoder::trunk(const at::Tensor& ids) {
  at::Tensor x = embedding_.forward(ids, nullptr);
  for (const auto& layer : layers_) x = layer->forward(x, ids.size(0), nullptr);
  return x;
}

Encoder::Evaluation Encoder::evaluate(const at::Tensor& ids, const at::Tensor& positions, const at::Tensor& labels) {
  const kernels::CrossEntropy result = vocabulary_cross_entropy_(local_logits(ids, positions), labels,
                                                                 /*write_gradient=*/false, embedding_.range(), tensor_);
  return {result.loss_sum, result.correct};
}

at::Tensor Encoder::local_logits(const at::Tensor& ids, const at::Tensor& positions) {
  return head_.logits(trunk(ids), positions, nullptr);
}

at::Tensor Encoder::logits(const at::Tensor& ids, const at::Tensor& positions) {
  return gather_logits(local_logits(ids, positions), config_.vocab_size, tensor_);
}

at::Tensor Encoder::hidden(const at::Tensor& ids) {
  return head_.normed(trunk(ids)).view({ids.size(0), ids.size(1), -1});
}

}  // namespace cram
