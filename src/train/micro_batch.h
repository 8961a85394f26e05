// How train.micro_batch_size=auto is resolved before a run starts.
#pragma once

#include <optional>

#include "parallel/mesh.h"
#include "run/signals.h"
#include "train/run_description.h"

namespace cram {

/// The size measured before for this device and model, if it is one that this configuration can do.
[[nodiscard]] std::optional<std::int64_t> remembered_micro_batch(const RunDescription& run);

/// What train.micro_batch_size=auto is for `run`: the size measured before for this device and model, else the
/// fastest of a short search with made-up rows, which is remembered. The search builds a model of its own and gives its
/// memory back. Collective over the mesh, the same on every rank. A signal ends the search; nothing is remembered then.
[[nodiscard]] std::int64_t choose_micro_batch(const RunDescription& run, const Mesh& mesh, const StopSignals& signals);

}  // namespace cram
