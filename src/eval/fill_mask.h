// The model's words for the gaps of a sentence: the fastest sign of life of a masked language model.
#pragma once

#include <string>
#include <vector>

#include "data/tokenizer.h"
#include "train/forward_pass.h"

namespace cram {

struct FilledGap {
  struct Candidate {
    std::string piece;  ///< as in the text: a leading space is shown as such where a word starts
    double probability = 0;
  };
  std::vector<Candidate> candidates;  ///< most probable first
};

/// Tokens of the sentence with its separators: it must fit a row.
[[nodiscard]] std::int64_t sentence_tokens(const Tokenizer& tokenizer, const std::string& sentence);

/// One entry for each "[MASK]" of the sentence. The sentence stands between two [SEP], as documents do in the corpus.
/// Throws Error(kUsage) when it has no gap or does not fit the model's rows.
[[nodiscard]] std::vector<FilledGap> fill_mask(ForwardPass& pass, const ModelConfig& model, const Tokenizer& tokenizer,
                                               const std::string& sentence, std::int64_t candidates);

}  // namespace cram
