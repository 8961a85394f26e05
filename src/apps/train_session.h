// One run of cram_train from a resolved command line to its summary: opens data, decides new run or resume, trains.
#pragma once

#include <string>
#include <vector>

#include "base/options.h"
#include "parallel/communicator.h"
#include "parallel/launch.h"
#include "parallel/watchdog.h"
#include "run/signals.h"
#include "train/train_config.h"

namespace cram {

struct TrainRequest {
  bool fresh = false;     ///< start at step 0 although the folder has a run, which is kept under another name
  bool force = false;     ///< go on although settings differ, or extend a finished run
  bool dry_run = false;   ///< print what would run and stop
  bool verify = false;    ///< check shards and checkpoints byte by byte and stop
  int planned_ranks = 0;  ///< of a dry run: as if started with so many; 0 = as many as there are
};

/// `given` is what `options` points to; every rank of `world` calls it with the same arguments. Returns the exit code;
/// throws Error, on one rank or on all, so the caller ends the job when this throws. `watchdog` is this rank's, or
/// null.
[[nodiscard]] int run_training(const Config& given, const OptionTable& options, const TrainRequest& request,
                               const Launch& launch, Communicator& world, const StopSignals& signals,
                               Watchdog* watchdog);

}  // namespace cram
