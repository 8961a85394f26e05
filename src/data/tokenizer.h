// SentencePiece behind our own normaliser. The model has identity normalisation, so every library that reads the model
// or the exported tokenizer.json splits text the same way.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/special_tokens.h"

namespace cram {

struct TokenizerSettings {
  std::int64_t vocab_size = 32768;
  std::string type = "bpe";  ///< bpe | unigram
  bool soft_vocab = false;   ///< take the largest possible vocabulary when the text cannot support `vocab_size`
};

/// Gives the next normalised document, or false at the end.
using NextText = std::function<bool(std::string&)>;

/// Trains a model and returns the bytes of its file. The bytes depend on the text and the settings alone (not on the
/// number of threads). Error(kUsage) names the smallest or largest possible size when `vocab_size` does not fit.
[[nodiscard]] std::string train_tokenizer(const NextText& next_text, const TokenizerSettings& settings);

/// Immutable after loading; encode and decode may be called from several threads.
class Tokenizer {
 public:
  /// From a folder with manifest.json and tokenizer.model: `cram_data tokenizer`'s output, a prepared shard folder. The
  /// file's digest is checked before it is parsed. Error(kData) otherwise.
  [[nodiscard]] static Tokenizer load(const std::string& folder);
  /// From a model file; `file_digest` (of its bytes) is checked first unless empty.
  [[nodiscard]] static Tokenizer load_file(const std::string& path, const std::string& file_digest = "");
  /// From the bytes of a model file; `origin` names them in messages.
  [[nodiscard]] static Tokenizer from_bytes(std::string bytes, const std::string& origin);

  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  /// Normalises and splits; never contains special ids other than [UNK], whatever the text says.
  [[nodiscard]] std::vector<std::uint32_t> encode(std::string_view text) const;
  /// The same for text that `normalize()` returned.
  [[nodiscard]] std::vector<std::uint32_t> encode_normalized(std::string_view text) const;
  /// Text of ids: special tokens are written by name, set off by spaces.
  [[nodiscard]] std::string decode(const std::vector<std::uint32_t>& ids) const;

  [[nodiscard]] std::int64_t vocab_size() const;
  [[nodiscard]] const std::string& piece(std::uint32_t id) const;  ///< "▁the"; Error(kData) when id >= vocab_size
  [[nodiscard]] double score(std::uint32_t id) const;              ///< merge order of BPE, log probability of Unigram
  [[nodiscard]] const std::string& type() const;                   ///< "bpe" or "unigram"
  /// Digest of the content: type, pieces and scores in order. Two files with the same vocabulary have the same digest.
  [[nodiscard]] const std::string& digest() const;
  [[nodiscard]] const std::string& bytes() const;  ///< of the model file

 private:
  struct State;
  explicit Tokenizer(std::unique_ptr<State> state) noexcept;
  std::unique_ptr<State> state_;
};

/// `encode_normalized` with a memory for words, several times faster on long texts and with the same result: no BPE
/// merge crosses a space, so a word is always split alike. (Unigram is passed through.) For one thread at a time.
class CachingEncoder {
 public:
  /// The tokenizer must outlive the encoder.
  explicit CachingEncoder(const Tokenizer& tokenizer) : tokenizer_(&tokenizer) {}
  [[nodiscard]] std::vector<std::uint32_t> encode_normalized(std::string_view text);

 private:
  struct TextHash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const noexcept { return std::hash<std::string_view>{}(text); }
  };
  const Tokenizer* tokenizer_;
  std::unordered_map<std::string, std::vector<std::uint32_t>, TextHash, std::equal_to<>> ids_of_word_;
};

}  // namespace cram
