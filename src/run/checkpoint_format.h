// The files of a checkpoint: names, manifest, the ranks' indexes, pieces with their digests. docs/formats.md has the
// same for readers of other programs.
//
// <run>/checkpoints/step-000000050/manifest.json     progress, settings, environment, files; written last
//                                 /rank-00000.h5     /master/<name>, /<state>/<name>
//                                 /rank-00000.json   its index: which slice of which tensor, digests piece by piece
//
// Every rank that holds something of its own writes one pair of files; the index says which slice of which tensor is in
// it and, where data ranks share out the state (ZeRO-1), which flat elements of the slice: then the arrays are 1-d and
// named <name>@<first element>. The content does not depend on who reads it: any layout loads any checkpoint.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/hdf5_file.h"
#include "model/parameter_store.h"
#include "run/budget_clock.h"

namespace cram {

/// What a checkpoint says about the run besides tensors.
struct CheckpointInfo {
  Progress progress;
  std::map<std::string, std::string> settings;     ///< resolved options, key -> value text
  std::map<std::string, std::string> identity;     ///< data and tokenizer digests
  std::map<std::string, std::string> environment;  ///< build, threads, instruction set: what can change bits
};

/// The progress as one line of text and back, to the last bit: what rank 0 tells the others.
[[nodiscard]] std::string progress_text(const Progress& progress);
[[nodiscard]] Progress parse_progress(const std::string& text);

/// Something of a checkpoint is missing or is not what was written: the one before may be whole. Everything else that
/// is wrong (another model, no permission) is a plain Error.
class CheckpointDamage : public Error {
 public:
  explicit CheckpointDamage(const std::string& message) : Error(ExitCode::kNoCheckpoint, message) {}
};

/// Throws CheckpointDamage with the concatenated parts.
template <class... Parts>
[[noreturn]] void damaged(const Parts&... parts) {
  throw CheckpointDamage(concat(parts...));
}

inline constexpr const char* kCheckpointManifest = "manifest.json";
[[nodiscard]] std::string step_name(std::int64_t step);
[[nodiscard]] bool is_step_name(const std::string& name);
[[nodiscard]] std::string rank_file_name(int rank);
/// "rank-00003.h5" -> "rank-00003.json".
[[nodiscard]] std::string index_name(const std::string& rank_file);

/// The stored form of a run of a slice's flat elements [begin, end): the master and every state, one array each.
struct StoredArray {
  ParamSpec spec;  ///< name, global shape and slice
  std::int64_t begin = 0, end = 0;
  /// Kind ("master", "exp_avg") -> the digest of each piece, in order. Empty in version 2.
  std::map<std::string, std::vector<std::string>> digests;
  /// Kind -> where the numbers begin in the file; see `frame_digest`.
  std::map<std::string, std::int64_t> offsets;

  [[nodiscard]] std::vector<std::int64_t> slice_shape() const;
  /// The slice's shape where all of it is here, 1-d otherwise.
  [[nodiscard]] std::vector<std::int64_t> shape() const;
  /// Where it lies in its rank's file.
  [[nodiscard]] std::string path(const std::string& kind) const;
};

/// Arrays are read and checked by pieces: runs of rows of the first dimension of at most this many bytes (one row
/// where a row is longer). Small, so that a rank that has a part of a tensor reads little beside it: the index takes
/// 35 bytes a piece.
inline constexpr std::int64_t kPieceBytes = std::int64_t{1} << 20;

/// The pieces of an array: piece i holds the rows [i*rows, (i+1)*rows) of the first dimension, as far as they exist.
struct Pieces {
  std::int64_t rows = 0;
  std::int64_t row_elements = 0;
  std::int64_t total_rows = 0;

  explicit Pieces(const ArrayInfo& array);
  [[nodiscard]] std::int64_t count() const { return rows > 0 ? (total_rows + rows - 1) / rows : 0; }
  [[nodiscard]] std::int64_t first_row(std::int64_t piece) const { return piece * rows; }
  [[nodiscard]] std::int64_t rows_of(std::int64_t piece) const { return std::min(rows, total_rows - piece * rows); }
};

/// A pair of files of one rank as the manifest knows them.
struct RankFile {
  std::string name;
  std::uintmax_t bytes = 0;
  std::string digest;  ///< of the index; in version 2, which has none, of the file itself
  std::uintmax_t index_bytes = 0;
};

/// What is in a rank's file.
struct RankIndex {
  std::vector<StoredArray> arrays;
  std::string frame;  ///< see `frame_digest`; "" in version 2
};

/// Digest of everything in a rank's file that is not a stored number: what HDF5 itself reads when it opens the file.
/// Checked before it does, since the library trusts what it reads. Throws CheckpointDamage.
[[nodiscard]] std::string frame_digest(const std::string& path, const RankIndex& index, ArrayType type);

struct CheckpointManifest {
  int version = 0;
  CheckpointInfo info;
  ArrayType type = ArrayType::kF32;  ///< of masters and states
  std::vector<RankFile> files;
  std::vector<RankIndex> indexes;  ///< of each file; of version 3 only in a catalogue
};

[[nodiscard]] std::string checkpoint_manifest_text(const CheckpointInfo& info, Precision precision,
                                                   const std::vector<RankFile>& files);
/// The manifest of a step folder, checked by its digest; the other files are not looked at. Throws CheckpointDamage,
/// or Error(20) for a checkpoint of another program or version.
[[nodiscard]] CheckpointManifest read_checkpoint_manifest(const std::string& step_folder);
/// That all files are there and have their sizes. Throws CheckpointDamage.
void check_sizes(const std::string& step_folder, const CheckpointManifest& manifest);

/// A rank's index.
[[nodiscard]] std::string index_text(const RankIndex& index);
/// An entry of the manifest's list of files, for the way from the rank that wrote them to rank 0, and back.
[[nodiscard]] std::string rank_file_text(const RankFile& file);
[[nodiscard]] RankFile parse_rank_file(const std::string& text);

/// CheckpointManifest and indexes as one text, each checked by its digest, for a rank that has not read them itself.
[[nodiscard]] std::string read_catalogue(const std::string& step_folder);
[[nodiscard]] CheckpointManifest parse_catalogue(const std::string& text, const std::string& step_folder);

/// Reads an array file of a checkpoint by pieces, each checked against its digest before it is given away.
class PieceReader {
 public:
  /// Checks the frame and opens the file. Throws CheckpointDamage.
  PieceReader(const std::string& path, const RankIndex& index, ArrayType type);

  /// The bytes of one piece; they stay until the next call. Throws CheckpointDamage naming file, array, piece and both
  /// digests.
  [[nodiscard]] const char* read(const StoredArray& array, const std::string& kind, std::int64_t piece);
  [[nodiscard]] std::uintmax_t bytes_read() const { return bytes_read_; }

 private:
  std::string path_;
  ArrayType type_;
  ArrayFileReader file_;
  std::vector<char> buffer_;
  std::uintmax_t bytes_read_ = 0;
};

}  // namespace cram
