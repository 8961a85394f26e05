// The crammed encoder (recipe: Geiping & Goldstein, ICML 2023) with an explicit backward pass.
//
// No autograd: gradients go straight into the flat buffers of the parameter store, and bf16 weights can have fp32
// gradients. Legend: B rows, S tokens a row, N = B*S, H hidden, M masked positions, V vocabulary.
#pragma once

#include <memory>
#include <vector>

#include "model/attention.h"
#include "model/embedding.h"
#include "model/ffn.h"
#include "model/mlm_head.h"

namespace cram {

/// Pre-norm layer: x += attn(norm1(x)); x += ffn(norm2(x)).
class EncoderLayer {
 public:
  struct Saved {
    LayerNorm::Saved norm1, norm2;
    SelfAttention::Saved attention;
    GatedFfn::Saved ffn;
  };

  EncoderLayer(const std::string& name, const ModelConfig& config, ParameterStore& store, Communicator& tensor);
  [[nodiscard]] at::Tensor forward(const at::Tensor& x, std::int64_t batch, Saved* saved) const;
  [[nodiscard]] at::Tensor backward(const at::Tensor& dy, const Saved& saved) const;

 private:
  LayerNorm norm1_;
  SelfAttention attention_;
  LayerNorm norm2_;
  GatedFfn ffn_;
};

class Encoder {
 public:
  /// Registers every parameter with the store, which the caller allocates and fills afterwards. `tensor` is the group
  /// whose ranks share heads, FFN columns and vocabulary; every method is then collective over it. Store and group must
  /// outlive the encoder. Throws Error(kUsage) with the legal sizes when the group cannot share the model.
  Encoder(const ModelConfig& config, ParameterStore& store, Communicator& tensor);
  /// On one rank.
  Encoder(const ModelConfig& config, ParameterStore& store);

  /// One training micro-batch: ids [B,S], positions [M] (flat b*S+s), labels [M]. Adds the gradient of the loss SUM to
  /// the store's gradients and returns that sum as [] fp64 on the device.
  [[nodiscard]] at::Tensor forward_backward(const at::Tensor& ids, const at::Tensor& positions,
                                            const at::Tensor& labels);

  struct Evaluation {
    at::Tensor loss_sum;  // [] fp64
    at::Tensor correct;   // [] int64
  };
  /// Loss sum and number of correct predictions, no gradients.
  [[nodiscard]] Evaluation evaluate(const at::Tensor& ids, const at::Tensor& positions, const at::Tensor& labels);

  /// Logits [M,V] at the positions.
  [[nodiscard]] at::Tensor logits(const at::Tensor& ids, const at::Tensor& positions);
  /// Hidden states [B,S,H] after the final norm.
  [[nodiscard]] at::Tensor hidden(const at::Tensor& ids);

  [[nodiscard]] const ModelConfig& config() const { return config_; }

 private:
  [[nodiscard]] at::Tensor trunk(const at::Tensor& ids);
  Encoder(const ModelConfig& config, ParameterStore& store, std::unique_ptr<Communicator> alone);
  [[nodiscard]] at::Tensor local_logits(const at::Tensor& ids, const at::Tensor& positions);
  std::unique_ptr<Communicator> alone_;  // where no group was given
  ModelConfig config_;
  Communicator& tensor_;
  Embedding embedding_;
  std::vector<std::unique_ptr<EncoderLayer>> layers_;
  MlmHead head_;
};

}  // namespace cram
