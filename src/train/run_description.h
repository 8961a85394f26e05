// One resolved run: what was given, made definite on all ranks alike before any part is built or anything is written.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "base/options.h"
#include "parallel/communicator.h"
#include "parallel/mesh.h"
#include "train/device.h"
#include "train/step_graph.h"
#include "train/train_config.h"

namespace cram {

/// What every part of a run is built from, each from its own small settings. Made by resolve_run and never changed: a
/// run with another micro-batch is another description.
struct RunDescription {
  Config config;  ///< no `auto` is left in it but train.micro_batch_size's, until with_micro_batch
  Layout layout;
  DeviceChoice device;  ///< this rank's; kind, precision and threads are the same on all
  GraphChoice graph;

  [[nodiscard]] bool has_micro_batch() const { return config.train.micro_batch_size != kAutoMicroBatch; }
};

/// What prepared data decides about a run.
struct DataShape {
  std::int64_t vocab_size = 0, seq_length = 0;
  std::string folder, tokenizer_digest;  ///< for messages
};

/// Resolves `given` for `layout`: values that follow from others or from the data, then device, precision and threads.
/// Throws Error(kUsage), on every rank, for what cannot be: before anything is written. Collective over `world`, with
/// the same arguments but for `place`. With `plans` nothing will run: see propose_device.
[[nodiscard]] RunDescription resolve_run(const Config& given, const Layout& layout, const DataShape& data,
                                         const MachinePlace& place, Communicator& world, bool plans = false);

/// Makes what each rank proposes one choice for all: other kinds of device and other precisions are Error(kUsage) with
/// rank, setting and both values; of threads the smallest number is taken, which is said. Collective.
[[nodiscard]] DeviceChoice agree_on_device(const DeviceChoice& proposal, Communicator& world);

/// The same run with this micro-batch. Throws Error(kUsage) when its rows cannot be shared out.
[[nodiscard]] RunDescription with_micro_batch(const RunDescription& run, std::int64_t rows);

/// Every option of `config`, key -> value text: what checkpoints keep and a resumed run is compared with.
[[nodiscard]] std::map<std::string, std::string> settings_of(const Config& config);
/// What resolving changed: the entries of settings_of(resolved) that are not as given.
[[nodiscard]] std::map<std::string, std::string> resolved_values(const OptionTable& given, const Config& resolved);

/// Ranks that were not started alike would train apart, or hang: refuses, with Error(kUsage) naming rank, setting and
/// both values, when a rank has other options, another program or other data than rank 0. Collective.
void check_started_alike(Communicator& world, const OptionTable& options, const std::string& data_digest);

}  // namespace cram
