// Word embedding plus positions, then LayerNorm. Tensor ranks share the vocabulary's rows; each adds the rows it has,
// and one reduction makes the sum.
#pragma once

#include <memory>

#include "base/special_tokens.h"
#include "model/norm.h"
#include "model/positions.h"
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
  /// dy [N,H]; adds to the gradients of the embedding, the positions and the norm.
  void backward(const at::Tensor& dy, const Saved& saved);

  [[nodiscard]] const VocabularyRange& range() const { return range_; }

 private:
  const ParameterStore& store_;
  TensorRegion tensor_;
  VocabularyRange range_;
  ParamId word_embedding_;
  std::unique_ptr<PositionForm> positions_;
  LayerNorm norm_;
};

}  // namespace cram
