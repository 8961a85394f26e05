// What a run in a layout will need, before anything is allocated: parameters, bytes, FLOPs, activations, communication
// and bubble. The figures of --dry-run, and the formulas that tests hold the measured traffic against.
//
// Formulas: Narayanan et al. 2021 (sections 2 and 3), Korthikanti et al. 2022 (section 4), for this encoder's own
// shapes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/stage_split.h"
#include "parallel/mesh.h"
#include "train/traffic.h"
#include "train/train_config.h"

namespace cram {

/// A stage's share; tensor rank 0, and the data rank with the most.
struct StagePlanned {
  std::vector<BlockRange> blocks;
  std::int64_t parameters = 0;  ///< elements a rank holds
  double weight_bytes = 0;      ///< working copies
  double gradient_bytes = 0;
  double state_bytes = 0;       ///< masters that are no working copy, and what the optimizer keeps
  double activation_bytes = 0;  ///< at the schedule's peak; an estimate (activation_estimate.h)
  double flops_per_step = 0;    ///< matrix products, forward and backward
  int most_in_flight = 0;       ///< micro-batches (of a block) whose backward pass is still to come
};

struct RunPlanned {
  std::vector<StagePlanned> stages;
  std::int64_t micro_batches = 0;  ///< a batch and data rank
  std::int64_t batch_size = 0;     ///< rows
  double bubble = 0;               ///< fraction of the ideal time, by simulation with a backward twice a forward
  Traffic traffic;
};

/// For a batch of `batch_size` rows with `masked` masked tokens in all (0 = masked_per_row in every row). `config` is
/// resolved (precision included) and fits `layout`.
[[nodiscard]] RunPlanned plan_run(const Config& config, const Layout& layout, std::int64_t batch_size,
                                  std::int64_t masked_per_row, std::int64_t masked = 0);

/// Lines for a person: groups, then one line a stage, bubble and traffic.
[[nodiscard]] std::string describe_plan(const RunPlanned& plan, const Config& config, const Layout& layout);

}  // namespace cram
