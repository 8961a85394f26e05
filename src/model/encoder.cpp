#include "model/encoder.h"

#include <torch/types.h>

#include "base/check.h"

namespace cram {
namespace {

std::vector<std::unique_ptr<EncoderLayer>> make_layers(const ModelConfig& config, ParameterStore& store) {
  std::vector<std::unique_ptr<EncoderLayer>> layers;
  for (std::int64_t i = 0; i < config.layers; ++i) {
    layers.push_back(std::make_unique<EncoderLayer>(concat("encoder.layers.", i), config, store));
  }
  return layers;
}

}  // namespace

EncoderLayer::EncoderLayer(const std::string& name, const ModelConfig& config, ParameterStore& store)
    : norm1_(name + ".norm1", config.hidden, store),
      attention_(name + ".attn", config, store),
      norm2_(name + ".norm2", config.hidden, store),
      ffn_(name + ".ffn", config, store) {}

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

Encoder::Encoder(const ModelConfig& config, ParameterStore& store)
    : config_(config),
      embedding_(config, store),
      layers_(make_layers(config, store)),
      head_(config, embedding_.word_embedding(), store) {}

at::Tensor Encoder::forward_backward(const at::Tensor& ids, const at::Tensor& positions, const at::Tensor& labels) {
  Embedding::Saved embedding_saved;
  std::vector<EncoderLayer::Saved> saved(layers_.size());
  at::Tensor x = embedding_.forward(ids, &embedding_saved);  // [N,H]
  for (std::size_t i = 0; i < layers_.size(); ++i) x = layers_[i]->forward(x, ids.size(0), &saved[i]);
  MlmHead::Saved head_saved;
  const at::Tensor logits = head_.logits(x, positions, &head_saved);  // [M,V]
  const at::Tensor loss_sum = kernels::cross_entropy_(logits, labels, /*write_gradient=*/true).loss_sum;

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
  const at::Tensor at_positions = logits(ids, positions);
  const kernels::CrossEntropy result = kernels::cross_entropy_(at_positions, labels, /*write_gradient=*/false);
  return {result.loss_sum, result.correct};
}

at::Tensor Encoder::logits(const at::Tensor& ids, const at::Tensor& positions) {
  return head_.logits(trunk(ids), positions, nullptr);
}

at::Tensor Encoder::hidden(const at::Tensor& ids) {
  return head_.normed(trunk(ids)).view({ids.size(0), ids.size(1), -1});
}

}  // namespace cram
