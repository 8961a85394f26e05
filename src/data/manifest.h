// manifest.json: what a tokenizer folder or a prepared folder contains, written last. The folder is whole when its
// manifest reads, and the manifest carries a digest of itself.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "data/shard.h"

#include "base/folder_lock.h"

namespace cram {

inline constexpr const char* kManifestName = "manifest.json";
inline constexpr const char* kTokenizerFileName = "tokenizer.model";

struct TokenizerRecord {
  std::int64_t vocab_size = 0;
  std::string type;         ///< "bpe" or "unigram"
  std::string digest;       ///< of the vocabulary's content, Tokenizer::digest()
  std::string file_digest;  ///< of the bytes of tokenizer.model
};

struct SplitRecord {
  std::int64_t rows = 0;
  std::int64_t documents = 0;
  std::int64_t dropped_tokens = 0;  ///< the remainder that filled no row
  std::vector<ShardFile> shards;
};

struct Manifest {
  std::string kind;                             ///< "tokenizer" or "shards"
  std::string inputs_digest;                    ///< of the content of the input files in order
  std::map<std::string, std::string> settings;  ///< everything else that decides the content of the folder
  TokenizerRecord tokenizer;
  // Of kind "shards" only:
  std::int64_t seq_length = 0;
  std::string order;
  std::map<std::string, std::int64_t> counts;  ///< statistics for people: bytes and documents kept and dropped, tokens
  std::map<std::string, SplitRecord> splits;   ///< "train", "validation"
};

/// Is there a manifest in the folder (whole or not)?
[[nodiscard]] bool has_manifest(const std::filesystem::path& folder);
/// Error(kData) when it is missing, damaged, edited or of another version.
[[nodiscard]] Manifest read_manifest(const std::filesystem::path& folder);
/// Atomic; the same content gives the same bytes.
void write_manifest(const std::filesystem::path& folder, const Manifest& manifest);

/// What is wrong with a prepared folder.
struct Damage {
  std::string shard;    ///< its file's name; "" = the folder itself
  std::string message;  ///< one line for a person
  bool operator==(const Damage&) const = default;
};
/// Which part of the checks somebody makes: every `parts`-th shard from `part` on; the folder itself is part 0's.
struct CheckPart {
  int part = 0, parts = 1;
};

/// Checks that every file the manifest names is there with its size, that no other shard lies beside them, and each
/// shard's header, opening it once; with `digests` also the content of every file. Empty when all is well.
[[nodiscard]] std::vector<Damage> find_damage(const std::filesystem::path& folder, const Manifest& manifest,
                                              bool digests, CheckPart part = {});

/// Lines for a message: the first few, and how many more there are.
[[nodiscard]] std::string damage_text(const std::vector<Damage>& damage);

/// Does the folder already hold what (kind, inputs_digest, settings) of `wanted` make? Damaged content of that kind
/// counts as not made. Error(kUsage) when something else is there, unless `force`; a folder of another kind is never
/// given up.
[[nodiscard]] bool is_already_made(const std::filesystem::path& folder, const Manifest& wanted, bool force);

/// Makes the folder ready for new content, as its only writer while the lock lives: creates it, refuses it like
/// is_already_made, removes its manifest first (what follows is not whole until a
/// new one is written), then leftovers and old shards.
[[nodiscard]] FolderLock begin_folder(const std::filesystem::path& folder, const Manifest& wanted, bool force);

}  // namespace cram
