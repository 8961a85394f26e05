// Checkpoints: logical tensors by name and slice, committed by one rename, trusted only after their digests were
// checked.
//
// <run>/checkpoints/step-000000050/manifest.json   sizes, digests, progress, settings, environment; written last
//                                 /rank-00000.h5   /master/<name>, /exp_avg/<name>, /exp_avg_sq/<name>
//
// Every rank that holds something of its own writes one file; the manifest says which slice of which tensor is where,
// and, where data ranks share out the state (ZeRO-1), which flat elements of the slice: then the arrays are 1-d and
// named <name>@<first element>. The content does not depend on who reads it: any layout loads any checkpoint.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "model/parameter_store.h"
#include "parallel/communicator.h"
#include "train/budget_clock.h"

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

class CheckpointFolder {
 public:
  /// `folder` is <run>/checkpoints; it is made at the first save.
  explicit CheckpointFolder(std::string folder) : folder_(std::move(folder)) {}

  /// Writes step-<step>, verifies it, then deletes the oldest beyond `keep` and leftovers of crashed saves. Returns the
  /// bytes written by all ranks. On failure the temporary is removed, older checkpoints are untouched and every rank
  /// throws Error(21). Collective over `world`; `writes` is false on ranks whose tensors others hold as well.
  std::uintmax_t save(const ParameterStore& store, const CheckpointInfo& info, std::int64_t keep, Communicator& world,
                      bool writes);
  /// On one rank.
  std::uintmax_t save(const ParameterStore& store, const CheckpointInfo& info, std::int64_t keep);

  struct Found {
    std::string path;
    CheckpointInfo info;
  };
  /// The newest checkpoint whose manifest, sizes and digests hold. A damaged one is set aside (renamed to *.damaged)
  /// with a warning and the one before is tried. Nothing there: nullopt. All damaged: Error(20) with the reasons.
  [[nodiscard]] std::optional<Found> newest_valid();

  /// Committed step folders, oldest first.
  [[nodiscard]] std::vector<std::string> committed() const;
  [[nodiscard]] const std::string& folder() const { return folder_; }

 private:
  /// Rank 0: manifest, rename, read back, clean up.
  std::uintmax_t commit(const std::string& temporary, const std::string& target,
                        const std::vector<std::string>& entries, const std::vector<std::string>& problems,
                        const ParameterStore& store, const CheckpointInfo& info, std::int64_t keep);
  std::string folder_;
};

/// Reads and checks one step folder: manifest, sizes, digests. Throws Error(20) naming file, expected and found.
[[nodiscard]] CheckpointInfo verify_checkpoint(const std::string& step_folder);

/// Loads masters (and moments, where the store has them) by name from a verified step folder, whatever layout wrote it;
/// every parameter must be there whole and with its shape. Sets the working weights as well. Names that the store has
/// not are refused unless they are in `elsewhere`: parameters of other pipeline stages.
void load_checkpoint(const std::string& step_folder, ParameterStore& store,
                     const std::set<std::string>& elsewhere = {});

/// Bytes that one checkpoint of this store takes, for the warning before the disk is full.
[[nodiscard]] std::uintmax_t checkpoint_bytes(const ParameterStore& store);

}  // namespace cram
