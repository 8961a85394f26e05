// The folder of checkpoints of a run: saved by all ranks, committed by one rename, trusted only piece by piece.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "parallel/communicator.h"
#include "run/checkpoint_format.h"
#include "run/checkpoint_load.h"

namespace cram {

class CheckpointFolder {
 public:
  /// `folder` is <run>/checkpoints; it is made at the first save.
  explicit CheckpointFolder(std::string folder) : folder_(std::move(folder)) {}

  /// Writes step-<step>; every rank reads its own file back; after all of them and the manifest have passed, the oldest
  /// beyond `keep` and leftovers of crashed saves are deleted. Returns the bytes written by all ranks, on rank 0. On
  /// failure the temporary is removed, older checkpoints are untouched and every rank throws Error(21). Collective over
  /// `world`; `writes` is false on ranks whose tensors others hold as well.
  std::uintmax_t save(const ParameterStore& store, const CheckpointInfo& info, std::int64_t keep, Communicator& world,
                      bool writes);
  /// On one rank.
  std::uintmax_t save(const ParameterStore& store, const CheckpointInfo& info, std::int64_t keep);

  struct Found {
    std::string path;
    CheckpointInfo info;
  };
  /// The newest checkpoint whose manifest holds and whose files have their sizes; of the tensors nothing is read.
  /// Those passed over are remembered. Nothing there: nullopt. All damaged: Error(20) with the reasons. On one rank.
  [[nodiscard]] std::optional<Found> newest();

  /// Loads what `newest` found on rank 0. When a rank finds a damaged piece in it, all agree to take the one before;
  /// before that rank 0 asks `accept`, which may throw. Once one is loaded, the damaged ones are set aside (renamed to
  /// *.damaged) with a warning. Returns what was loaded, on rank 0. Collective over the mesh.
  Found load(const Found& newest, ParameterStore& store, const Mesh& mesh, const LoadRule& rule,
             const std::function<void(const Found&)>& accept);
  /// `newest` and `load` on one rank.
  std::optional<Found> load_newest(ParameterStore& store, const LoadRule& rule = {});

  /// Committed step folders, oldest first.
  [[nodiscard]] std::vector<std::string> committed() const;
  [[nodiscard]] const std::string& folder() const { return folder_; }

 private:
  /// Rank 0: manifest, rename, read back, clean up.
  std::uintmax_t commit(const std::string& temporary, const std::string& target,
                        const std::vector<std::string>& entries, const std::vector<std::string>& problems,
                        const ParameterStore& store, const CheckpointInfo& info, std::int64_t keep) const;
  void set_damaged_aside(const std::string& valid);

  struct Damaged {
    std::string path, reason;
  };
  std::string folder_;
  std::vector<Damaged> damaged_;  ///< newest first
};

/// Bytes of tensors that this rank's part of a checkpoint takes, for the warning before the disk is full.
[[nodiscard]] std::uintmax_t checkpoint_bytes(const ParameterStore& store);

}  // namespace cram
