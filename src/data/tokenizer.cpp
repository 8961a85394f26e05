#include "data/tokenizer.h"

#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <algorithm>
#include <array>
#include <bitset>
#include <exception>
#include <filesystem>
#include <unordered_map>
#include <utility>

#include "base/check.h"
#include "base/digest.h"
#include "base/file_io.h"
#include "data/manifest.h"
#include "data/text.h"

namespace cram {
namespace {

constexpr std::string_view kBlank = "\xE2\x96\x81";  // "▁" stands for a space, at the start of a piece only
constexpr std::size_t kSentenceLimit = 2000;         // SentencePiece silently skips longer ones (4,192 bytes)
constexpr std::size_t kEncodeChunk = 16384;
constexpr std::size_t kCachedWords = std::size_t{1} << 20U;
constexpr std::uintmax_t kModelLimit = 256U << 20U;
constexpr const char* kTrainThreads =
    "4";  // part of the model's bytes and of Unigram's sums: never the machine's count

/// Cuts normalised documents into sentences: at a space within the limit, or at the limit where a word is longer.
class SentenceSource : public sentencepiece::SentenceIterator {
 public:
  explicit SentenceSource(const NextText& next_text) : next_text_(next_text) { Next(); }

  bool done() const override { return done_; }
  const std::string& value() const override { return sentence_; }
  sentencepiece::util::Status status() const override { return {}; }
  void Next() override {
    while (at_ >= document_.size()) {
      at_ = 0;
      document_.clear();
      if (!next_text_(document_)) {
        done_ = true;
        return;
      }
    }
    std::size_t stop = document_.size();
    if (stop - at_ > kSentenceLimit) {
      stop = document_.rfind(' ', at_ + kSentenceLimit);
      if (stop == std::string::npos || stop <= at_) stop = at_ + kSentenceLimit;
    }
    sentence_ = document_.substr(at_, stop - at_);
    at_ = stop < document_.size() && document_[stop] == ' ' ? stop + 1 : stop;
    for (const char c : sentence_) seen_.set(static_cast<unsigned char>(c));
  }

  /// Characters a vocabulary must have: those of the text, and the blank that begins every sentence.
  [[nodiscard]] std::int64_t required_characters() const {
    std::bitset<256> required = seen_;
    required.set(' ');
    return static_cast<std::int64_t>(required.count());
  }

 private:
  const NextText& next_text_;
  std::string document_;
  std::size_t at_ = 0;
  std::string sentence_;
  bool done_ = false;
  std::bitset<256> seen_;
};

std::string control_symbols() {
  return concat(kSpecialPieces[kClsId], ",", kSpecialPieces[kSepId], ",", kSpecialPieces[kMaskId]);
}

}  // namespace

std::string train_tokenizer(const NextText& next_text, const TokenizerSettings& settings) {
  constexpr std::int64_t kLargestVocabulary = std::int64_t{1} << 24U;
  CRAM_CHECK(settings.type == "bpe" || settings.type == "unigram", ExitCode::kUsage, "unknown tokenizer type '",
             settings.type, "': expected bpe or unigram");
  CRAM_CHECK(settings.vocab_size > kSpecialTokens && settings.vocab_size <= kLargestVocabulary, ExitCode::kUsage,
             "the vocabulary size must be in [", kSpecialTokens + 1, ", ", kLargestVocabulary, "], got ",
             settings.vocab_size);
  SentenceSource sentences(next_text);
  CRAM_CHECK(!sentences.done(), ExitCode::kData, "the inputs have no text to train a tokenizer on");

  // hard_vocab_limit=false: SentencePiece stops at the largest size the text supports and we decide what that means.
  const std::unordered_map<std::string, std::string> arguments{
      {"model_type", settings.type},
      {"vocab_size", std::to_string(settings.vocab_size)},
      {"hard_vocab_limit", "false"},
      {"normalization_rule_name", "identity"},
      {"character_coverage", "1.0"},
      {"pad_id", std::to_string(kPadId)},
      {"unk_id", std::to_string(kUnkId)},
      {"bos_id", "-1"},
      {"eos_id", "-1"},
      {"pad_piece", kSpecialPieces[kPadId]},
      {"unk_piece", kSpecialPieces[kUnkId]},
      {"control_symbols", control_symbols()},
      {"num_threads", kTrainThreads},
      {"input_sentence_size", "0"},
      {"shuffle_input_sentence", "false"},
      {"minloglevel", "3"},
  };
  std::string model;
  sentencepiece::util::Status status;
  try {
    status = sentencepiece::SentencePieceTrainer::Train(arguments, &sentences, &model);
  } catch (const Error&) {
    throw;  // of our own document reader
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    fail(ExitCode::kData, "SentencePiece failed while training: ", error.what());
  }
  const std::int64_t smallest = kSpecialTokens + sentences.required_characters();
  CRAM_CHECK(settings.vocab_size >= smallest, ExitCode::kUsage, "a vocabulary of ", settings.vocab_size,
             " entries is too small for this text: the smallest possible size is ", smallest, " (its characters and ",
             kSpecialTokens, " special tokens). Ask for --vocab-size ", smallest, " or more");
  CRAM_CHECK(status.ok(), ExitCode::kData, "SentencePiece failed while training: ", status.ToString());
  const std::int64_t size = Tokenizer::from_bytes(model, "the trained model").vocab_size();
  CRAM_CHECK(size == settings.vocab_size || settings.soft_vocab, ExitCode::kUsage, "a vocabulary of ",
             settings.vocab_size, " entries was asked for, but this text supports at most ", size,
             ": the largest possible size is ", size, ". Use --vocab-size ", size,
             ", or --soft-vocab to take what there is, or more text");
  return model;
}

struct Tokenizer::State {
  std::string bytes;
  sentencepiece::SentencePieceProcessor processor;
  std::vector<std::string> pieces;
  std::vector<float> scores;
  std::string type;
  std::string digest;

  void append_ids(std::string_view text, std::vector<std::uint32_t>& ids) const {
    std::vector<int> encoded;
    sentencepiece::util::Status status;
    try {
      status = processor.Encode(absl::string_view(text.data(), text.size()), &encoded);
    } catch (const std::bad_alloc&) {
      throw;
    } catch (const std::exception& error) {
      fail(ExitCode::kData, "SentencePiece failed to encode ", text.size(), " bytes: ", error.what());
    }
    CRAM_CHECK(status.ok(), ExitCode::kData, "SentencePiece failed to encode ", text.size(),
               " bytes: ", status.ToString());
    for (const int id : encoded) ids.push_back(static_cast<std::uint32_t>(id));
  }
};

Tokenizer::Tokenizer(std::unique_ptr<State> state) noexcept : state_(std::move(state)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Tokenizer Tokenizer::load(const std::string& folder) {
  const Manifest manifest = read_manifest(folder);
  const std::string path = (std::filesystem::path(folder) / kTokenizerFileName).string();
  Tokenizer tokenizer = load_file(path, manifest.tokenizer.file_digest);
  CRAM_CHECK(tokenizer.digest() == manifest.tokenizer.digest, ExitCode::kData, "the vocabulary of ", path,
             " has digest ", tokenizer.digest(), ", the manifest says ", manifest.tokenizer.digest,
             ": was it made with another version of SentencePiece?");
  return tokenizer;
}

Tokenizer Tokenizer::load_file(const std::string& path, const std::string& file_digest) {
  std::string bytes = read_file(path, ExitCode::kData, kModelLimit);
  const std::string found = digest_text(bytes);
  CRAM_CHECK(file_digest.empty() || found == file_digest, ExitCode::kData, "the tokenizer ", path,
             " is damaged or another one: expected digest ", file_digest, ", found ", found,
             ". Make it again with `cram_data tokenizer --force`, or copy it again");
  return from_bytes(std::move(bytes), path);
}

Tokenizer Tokenizer::from_bytes(std::string bytes, const std::string& origin) {
  auto state = std::make_unique<State>();
  state->bytes = std::move(bytes);
  sentencepiece::util::Status status;
  try {
    status = state->processor.LoadFromSerializedProto(state->bytes);
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {  // a damaged trie throws from inside the parser
    fail(ExitCode::kData, origin, " is no SentencePiece model: ", error.what());
  }
  CRAM_CHECK(status.ok(), ExitCode::kData, origin, " is no SentencePiece model: ", status.ToString());

  const int size = state->processor.GetPieceSize();
  CRAM_CHECK(size > static_cast<int>(kSpecialTokens), ExitCode::kData, origin, " has ", size, " pieces only");
  // BPE scores are the merge order, 0, -1, -2, ...; Unigram's are log probabilities.
  bool merge_order = true;
  Digest digest;
  for (int id = 0; id < size; ++id) {
    const std::string& piece = state->processor.IdToPiece(id);
    const float score = state->processor.GetScore(id);
    const int first = static_cast<int>(kSpecialTokens);
    if (id < first) {
      CRAM_CHECK(piece == kSpecialPieces[id], ExitCode::kData, origin, " has '", piece, "' at id ", id, ", expected ",
                 kSpecialPieces[id], ": it was not made by `cram_data tokenizer`");
    } else {
      merge_order = merge_order && score == static_cast<float>(first - id);
    }
    digest.update(piece.data(), piece.size() + 1);  // with its end, or two pieces could be read as one
    digest.update(&score, sizeof score);
    state->pieces.push_back(piece);
    state->scores.push_back(score);
  }
  state->type = merge_order ? "bpe" : "unigram";
  digest.update(state->type.data(), state->type.size());
  state->digest = digest.hex();
  return Tokenizer(std::move(state));
}

std::vector<std::uint32_t> Tokenizer::encode(std::string_view text) const { return encode_normalized(normalize(text)); }

std::vector<std::uint32_t> Tokenizer::encode_normalized(std::string_view text) const {
  std::vector<std::uint32_t> ids;
  // No BPE merge crosses a space, so cutting there changes nothing and keeps the work per byte and the memory constant.
  while (state_->type == "bpe" && text.size() > kEncodeChunk) {
    const std::size_t stop = text.find(' ', kEncodeChunk);
    if (stop == std::string_view::npos) break;
    state_->append_ids(text.substr(0, stop), ids);
    text.remove_prefix(stop + 1);
  }
  if (!text.empty()) state_->append_ids(text, ids);
  return ids;
}

std::string Tokenizer::decode(const std::vector<std::uint32_t>& ids) const {
  std::string text;
  for (const std::uint32_t id : ids) {
    std::string_view rest = piece(id);
    if (id < kSpecialTokens) {
      text.append(" ").append(rest);
      continue;
    }
    while (!rest.empty()) {
      const bool blank = rest.starts_with(kBlank);
      text.push_back(blank ? ' ' : rest.front());
      rest.remove_prefix(blank ? kBlank.size() : 1);
    }
  }
  if (text.starts_with(' ')) text.erase(0, 1);
  return text;
}

std::int64_t Tokenizer::vocab_size() const { return static_cast<std::int64_t>(state_->pieces.size()); }

const std::string& Tokenizer::piece(std::uint32_t id) const {
  CRAM_CHECK(id < state_->pieces.size(), ExitCode::kData, "id ", id, " in a vocabulary of ", state_->pieces.size());
  return state_->pieces[id];
}

double Tokenizer::score(std::uint32_t id) const {
  CRAM_CHECK(id < state_->scores.size(), ExitCode::kData, "id ", id, " in a vocabulary of ", state_->scores.size());
  return static_cast<double>(state_->scores[id]);
}

const std::string& Tokenizer::type() const { return state_->type; }
const std::string& Tokenizer::digest() const { return state_->digest; }
const std::string& Tokenizer::bytes() const { return state_->bytes; }

std::vector<std::uint32_t> CachingEncoder::encode_normalized(std::string_view text) {
  if (tokenizer_->type() != "bpe") return tokenizer_->encode_normalized(text);
  std::vector<std::uint32_t> ids;
  ids.reserve(text.size() / 3);
  while (!text.empty()) {
    const std::string_view word = text.substr(0, text.find(' '));
    text.remove_prefix(std::min(text.size(), word.size() + 1));
    auto found = ids_of_word_.find(word);
    if (found == ids_of_word_.end()) {
      if (ids_of_word_.size() >= kCachedWords) ids_of_word_.clear();
      found = ids_of_word_.emplace(std::string(word), tokenizer_->encode_normalized(word)).first;
    }
    ids.insert(ids.end(), found->second.begin(), found->second.end());
  }
  return ids;
}

}  // namespace cram
