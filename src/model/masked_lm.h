// Masked language modelling (Devlin et al. 2019): the original ids at the masked positions, through the tied word
// embedding as decoder. Tensor ranks have the logits of their own rows of the vocabulary.
#pragma once

#include "model/objective.h"

namespace cram {

/// Registers no parameters: the decoder is the embedding's own.
[[nodiscard]] std::unique_ptr<Objective> make_masked_lm(const ObjectiveContext& context);
/// The decoder's product for one masked token: 2*H*V.
[[nodiscard]] double masked_lm_flops(const ModelConfig& config);

}  // namespace cram
