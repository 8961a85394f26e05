// The shard file: HDF5 with one dataset `input_ids` [N,S], uint16 (uint32 above 65,536 entries), little-endian, in
// chunks of 512 rows with a fletcher32 checksum, and attributes that describe it. A shard is written once and never
// changed; its XXH3-128 digest lives in the manifest. The same rows and header give the same bytes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

namespace cram {

inline constexpr std::int64_t kShardVersion = 1;
inline constexpr std::int64_t kShardBlockRows = 512;  ///< rows of a chunk: the unit of every read and write

/// The attributes of a shard file.
struct ShardHeader {
  std::int64_t seq_length = 0;  ///< S
  std::int64_t vocab_size = 0;  ///< V
  std::int64_t rows = 0;        ///< N
  std::int64_t shard_index = 0;
  std::string split;             ///< "train" or "validation"
  std::string order;             ///< as `pack --order`
  std::string tokenizer_digest;  ///< Tokenizer::digest()
  bool operator==(const ShardHeader&) const = default;
};

/// What the manifest records of a shard file.
struct ShardFile {
  std::string name;  ///< without folder
  std::int64_t rows = 0;
  std::int64_t bytes = 0;
  std::string digest;  ///< XXH3-128 of the whole file
  bool operator==(const ShardFile&) const = default;
};

/// Fills `out` [count,S] with rows [first, first+count).
using FillRows = std::function<void(std::int64_t first, std::int64_t count, std::uint32_t* out)>;

/// Makes the file in memory (2 or 4 bytes an id, twice), reads every row back, and writes it under a temporary name,
/// fsyncs and renames. Error(kData) names path and reason; an older file of that name is untouched then.
ShardFile write_shard(const std::filesystem::path& path, const ShardHeader& header, const FillRows& fill_rows);

/// One open shard file, read-only and without a file lock. Move-only.
class ShardReader {
 public:
  struct State;
  /// Error(kData) when the file is no shard of this version or its dataset disagrees with its header. Does not check
  /// the digest: that is for whoever has the manifest.
  [[nodiscard]] static ShardReader open(const std::filesystem::path& path);
  ShardReader(ShardReader&&) noexcept;
  ShardReader& operator=(ShardReader&&) noexcept;
  ~ShardReader();

  [[nodiscard]] const ShardHeader& header() const;
  /// Rows [first, first+count) into `out` [count,S]; Error(kData) when an id is not below the vocabulary size.
  void read(std::int64_t first, std::int64_t count, std::uint32_t* out) const;

 private:
  explicit ShardReader(std::unique_ptr<State> state) noexcept;
  std::unique_ptr<State> state_;
};

/// "HDF5 1.10.8", for records of the environment.
[[nodiscard]] std::string hdf5_version();

}  // namespace cram
