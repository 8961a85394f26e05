// From a step folder into a parameter store of any layout. A rank reads what it owns, by pieces, each checked before it
// is used; where data ranks hold the same they share the reading. What all ranks together read does therefore not grow
// with their number.
#pragma once

#include <functional>
#include <set>
#include <string>

#include "parallel/mesh.h"
#include "run/checkpoint_format.h"

namespace cram {

/// What to do about names that only one of checkpoint and model has. What is not covered is refused with Error(20).
struct LoadRule {
  /// Parameters that this rank's stage has not and others have.
  std::set<std::string> elsewhere = {};
  /// Of a parameter that only the model has: it keeps its initial value and its states (a fresh head). Said in the log.
  std::function<bool(const std::string& name)> may_be_fresh = {};
  /// Of a parameter that only the checkpoint has: it is left where it is. Said in the log.
  std::function<bool(const std::string& name)> may_be_unused = {};
};

/// Loads masters, the states that the store has, and working weights by name. Every tensor must be there whole, with
/// its shape and number format. Throws, on all ranks alike, CheckpointDamage where a rank finds something damaged (the
/// store is then partly written) and Error(20) for a checkpoint of another model. Returns the bytes of tensors that
/// this rank has read. Collective over the mesh.
std::uintmax_t load_checkpoint(const std::string& step_folder, ParameterStore& store, const Mesh& mesh,
                               const LoadRule& rule = {});
/// On one rank alone, whose store is not shared out.
std::uintmax_t load_checkpoint(const std::string& step_folder, ParameterStore& store, const LoadRule& rule = {});

/// Reads everything in a step folder: manifest, sizes, indexes and all pieces, which the ranks share. Throws
/// CheckpointDamage on all of them naming file, expected and found. Collective.
CheckpointInfo verify_checkpoint(const std::string& step_folder, Communicator& world);
/// On one rank alone.
CheckpointInfo verify_checkpoint(const std::string& step_folder);

}  // namespace cram
