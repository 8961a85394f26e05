// Masked-language-model head: final norm of the masked positions only, then the tied word embedding as decoder. Tensor
// ranks have the logits of their own rows of the vocabulary.
#pragma once

#include "model/kernels/panels.h"
#include "model/norm.h"
#include "parallel/regions.h"

namespace cram {

class MlmHead {
 public:
  struct Saved {
    at::Tensor positions;  // [M] rows of the hidden states; undefined: they are the hidden states
    std::int64_t rows = 0;
    LayerNorm::Saved norm;
    at::Tensor normed;  // [M,H]
  };

  /// Registers encoder.final_norm; the decoder is the embedding's own parameter.
  MlmHead(const ModelConfig& config, ParamId tied_embedding, ParameterStore& store, const TensorRegion& tensor);

  /// hidden [N,H] (with sequence parallelism this rank's rows, which are gathered), positions [M] -> logits [M,R] of
  /// this rank's rows. LayerNorm works row by row, so the rows are picked before it. Undefined positions: hidden [M,H]
  /// are picked rows already.
  [[nodiscard]] at::Tensor logits(const at::Tensor& hidden, const at::Tensor& positions, Saved* saved) const;
  /// d_logits [M,R] -> d_hidden as it was given, zero outside the positions; adds the decoder's part to the tied
  /// gradient.
  [[nodiscard]] at::Tensor backward(const at::Tensor& d_logits, const Saved& saved) const;
  /// final_norm(hidden) [N,H] for all rows.
  [[nodiscard]] at::Tensor normed(const at::Tensor& hidden) const {
    return final_norm_.forward(tensor_.gather_rows(hidden), nullptr);
  }

 private:
  const ParameterStore& store_;
  TensorRegion tensor_;
  ParamId tied_embedding_;
  LayerNorm final_norm_;
  mutable kernels::WeightPanels panels_;  // of the decoder
};

}  // namespace cram
