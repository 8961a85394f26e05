// How train.micro_batch_size=auto is resolved before a run starts.
#pragma once

#include <optional>

#include "model/encoder.h"
#include "parallel/mesh.h"
#include "train/device.h"
#include "train/signals.h"
#include "train/train_config.h"

namespace cram {

/// The size measured before for this device and model, if it is one that this configuration can do.
[[nodiscard]] std::optional<std::int64_t> remembered_micro_batch(const Config& config, const Layout& layout,
                                                                 const DeviceChoice& choice);

/// Sets config.train.micro_batch_size, which is auto: to the size measured before for this device and model, else to
/// the fastest of a short search with made-up rows, which is remembered. Collective over the mesh; `store` is
/// allocated, its weights are overwritten. A signal ends the search; nothing is remembered then.
void choose_micro_batch(Config& config, const Mesh& mesh, Encoder& encoder, ParameterStore& store,
                        const DeviceChoice& choice, const StopSignals& signals);

}  // namespace cram
