// One split of a prepared folder, read as one long table of rows [N,S].
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "data/manifest.h"

namespace cram {

struct ShardSetOptions {
  bool verify_all = false;  ///< `data.verify = "full"`: check every shard's digest in open()
  bool skip_bad_shards =
      false;  ///< `data.on_bad_shard = "skip"`: implies verify_all; bad shards are left out and logged

  [[nodiscard]] bool reads_all() const { return verify_all || skip_bad_shards; }
};

/// The rows of all shards of one split, in the order in which they were prepared. Thread-compatible: one reader at a
/// time (the loader's thread while a loader lives). Move-only.
class ShardSet {
 public:
  /// Checks the folder as find_damage does and fails with Error(kData) before a row is read. `split` is "train" or
  /// "validation". Files are opened read-only and without locks.
  [[nodiscard]] static ShardSet open(const std::string& folder, const std::string& split,
                                     const ShardSetOptions& options = {});
  /// The split of a folder that was checked: opens no file. Shards named in `damage` are left out, with a warning;
  /// `verified`: digests were checked as well. Error(kData) when nothing is left.
  [[nodiscard]] static ShardSet of(const std::string& folder, const std::string& split, Manifest manifest,
                                   const std::vector<Damage>& damage, bool verified);

  ShardSet(ShardSet&&) noexcept;
  ShardSet& operator=(ShardSet&&) noexcept;
  ~ShardSet();

  [[nodiscard]] std::int64_t rows() const;                    ///< N
  [[nodiscard]] std::int64_t seq_length() const;              ///< S
  [[nodiscard]] std::int64_t vocab_size() const;              ///< V, the tokenizer's real size
  [[nodiscard]] const std::string& tokenizer_digest() const;  ///< of the vocabulary's content, see tokenizer.h
  [[nodiscard]] const std::string& order() const;             ///< as `pack --order` was
  [[nodiscard]] const std::string& folder() const;
  /// Identity of the data: digest over the split's name, the tokenizer and the digests of its shards in order.
  [[nodiscard]] std::string digest() const;

  /// Rows [first, first+count) into `out` [count,S]. A shard's digest is checked before its first row is used and
  /// every id is checked against V; Error(kData) otherwise. Reads go through a cache of 512-row blocks.
  void read_rows(std::int64_t first, std::int64_t count, std::uint32_t* out);

 private:
  struct State;
  explicit ShardSet(std::unique_ptr<State> state) noexcept;
  std::unique_ptr<State> state_;
};

/// How processes that open one folder share its checks.
struct SharedCheck {
  int part = 0, parts = 1;
  /// Every process' text, one after the other, on every process.
  std::function<std::string(const std::string& own)> exchange = [](const std::string& own) { return own; };
};
struct PreparedShards {
  ShardSet train, validation;
};
/// Both splits. All processes together open each shard once (and read it once with verify_all), and find the same.
[[nodiscard]] PreparedShards open_prepared(const std::string& folder, const ShardSetOptions& options,
                                           const SharedCheck& check);

/// Cross entropy in nats per token of the validation rows under the unigram distribution of the training rows with
/// add-one smoothing: the loss of a model that has learned the token frequencies and nothing else.
[[nodiscard]] double unigram_loss(ShardSet& train, ShardSet& validation);

}  // namespace cram
