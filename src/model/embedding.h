// Word embedding plus scaled sinusoidal positions, then LayerNorm. Tensor ranks share the vocabulary's rows; each adds
// the rows it has, and one reduction makes the sum.
#pragma once

#include "base/special_tokens.h"
#include "model/norm.h"
#include "model/vocabulary.h"
#include "parallel/regions.h"

namespace cram {

/// Registers encoder.embedding.word_embedding.weight [V,H], this rank's rows. `tied`: another stage has it as well;
/// `counts`: false for the second copy.
[[nodiscard]] ParamId add_word_embedding(const ModelConfig& config, ParameterStore& store, const TensorRegion& tensor,
                                         bool tied, bool counts);

class Embedding {
 public:
  struct Saved {
    at::Tensor rows;  // [N] of this rank's table; -1 = not ours, or the pad id
    std::int64_t batch = 0;
    LayerNorm::Saved norm;
  };

  /// `word_embedding`: made by add_word_embedding.
  Embedding(const ModelConfig& config, ParamId word_embedding, ParameterStore& store, const TensorRegion& tensor);

  /// ids [B,S'] with S' <= S -> [B*S',H] in the working format (rows shared out with sequence parallelism).
  [[nodiscard]] at::Tensor forward(const at::Tensor& ids, Saved* saved);
  /// dy [N,H]; adds to the gradients of the embedding, the position scale and the norm.
  void backward(const at::Tensor& dy, const Saved& saved);

  [[nodiscard]] const VocabularyRange& range() const { return range_; }

 private:
  [[nodiscard]] const at::Tensor& position_table();
  [[nodiscard]] at::Tensor positions_of_rows(std::int64_t rows, std::int64_t seq);
  ModelConfig config_;
  const ParameterStore& store_;
  TensorRegion tensor_;
  VocabularyRange range_;
  ParamId word_embedding_, scale_factor_;
  LayerNorm norm_;
  at::Tensor position_table_;  // [S,H] in the master format; made at first use, when the device is known
};

/// PE[s,2i] = sin(s * 10000^(-2i/H)), PE[s,2i+1] = cos(same), fp64 (Vaswani et al. 2017, section 3.5).
[[nodiscard]] at::Tensor sinusoidal_table(std::int64_t seq_length, std::int64_t hidden);

}  // namespace cram
