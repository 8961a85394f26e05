#include "eval/fill_mask.h"

#include <torch/types.h>

#include <algorithm>

#include "base/check.h"
#include "base/special_tokens.h"

namespace cram {
namespace {

constexpr std::string_view kGap = "[MASK]";
constexpr std::string_view kWordStart = "\u2581";  // SentencePiece's sign for a space before the piece

std::string readable(const std::string& piece) {
  if (piece.rfind(kWordStart, 0) == 0) return piece.substr(kWordStart.size());
  return "##" + piece;  // continues the word before the gap
}

struct GappedSentence {
  std::vector<std::int64_t> ids;
  std::vector<std::int64_t> gaps;  // positions in ids
};

GappedSentence split_at_gaps(const Tokenizer& tokenizer, const std::string& sentence) {
  GappedSentence result;
  std::vector<std::int64_t>& ids = result.ids;
  ids.push_back(kSepId);
  const auto append = [&](std::string_view text) {
    for (const std::uint32_t id : tokenizer.encode(text)) ids.push_back(id);
  };
  std::size_t start = 0;
  for (std::size_t gap = sentence.find(kGap); gap != std::string::npos; gap = sentence.find(kGap, start)) {
    append(std::string_view(sentence).substr(start, gap - start));
    result.gaps.push_back(static_cast<std::int64_t>(ids.size()));
    ids.push_back(kMaskId);
    start = gap + kGap.size();
  }
  append(std::string_view(sentence).substr(start));
  ids.push_back(kSepId);
  return result;
}

}  // namespace

std::int64_t sentence_tokens(const Tokenizer& tokenizer, const std::string& sentence) {
  return static_cast<std::int64_t>(split_at_gaps(tokenizer, sentence).ids.size());
}

std::vector<FilledGap> fill_mask(ForwardPass& pass, const ModelConfig& model, const Tokenizer& tokenizer,
                                 const std::string& sentence, std::int64_t candidates) {
  const auto [ids, gaps] = split_at_gaps(tokenizer, sentence);
  CRAM_CHECK(!gaps.empty(), ExitCode::kUsage, "\"", sentence, "\" has no ", kGap);
  const auto length = static_cast<std::int64_t>(ids.size());
  CRAM_CHECK(length <= model.seq_length, ExitCode::kUsage, "the sentence has ", length,
             " tokens, the model's rows have ", model.seq_length);

  const at::Tensor input = at::tensor(ids, at::kLong).view({1, length});
  const at::Tensor logits = pass.outputs(input, at::tensor(gaps, at::kLong)).to(at::kFloat).cpu();  // [gaps,V]
  logits.slice(1, 0, kSpecialTokens).fill_(-std::numeric_limits<float>::infinity());                // no words
  const auto [values, indices] =
      at::softmax(logits, 1).topk(std::min<std::int64_t>(candidates, logits.size(1) - kSpecialTokens), 1);
  std::vector<FilledGap> filled(gaps.size());
  for (std::int64_t g = 0; g < values.size(0); ++g) {
    for (std::int64_t k = 0; k < values.size(1); ++k) {
      const auto id = static_cast<std::uint32_t>(indices[g][k].item<std::int64_t>());
      filled[static_cast<std::size_t>(g)].candidates.push_back(
          {readable(tokenizer.piece(id)), values[g][k].item<double>()});
    }
  }
  return filled;
}

}  // namespace cram
