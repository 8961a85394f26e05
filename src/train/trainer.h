// The training loop: plan a step from the clock, run its micro-steps, update, report, save.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "data/batch_source.h"
#include "parallel/mesh.h"
#include "run/checkpoint.h"
#include "run/interval.h"
#include "run/metrics.h"
#include "run/run_folder.h"
#include "run/signals.h"
#include "train/run_description.h"
#include "train/traffic.h"
#include "train/training_step.h"

namespace cram {

/// Everything a trainer works with; owned by the caller and outliving it.
struct TrainerParts {
  const RunDescription& run;
  const Mesh& mesh;
  Model& model;
  ParameterStore& store;
  BatchSource& batches;            ///< from sample checkpoint_info.progress.consumed_samples on
  std::int64_t rows_an_epoch = 0;  ///< of the source
  const StopSignals& signals;
  std::string run_folder;
  CheckpointInfo checkpoint_info;  ///< settings, identity and environment for checkpoints; `progress` to start from
  /// Held-out evaluation and what else is shown with it. Bound by the program, so that training never sees evaluation.
  std::function<EvalRecord()> evaluate;
};

class Trainer {
 public:
  explicit Trainer(TrainerParts parts);

  /// Trains to the end of the budget, to run.stop_after or to a signal. Always ends with a saved checkpoint.
  [[nodiscard]] Summary run();

 private:
  struct StepPlan {
    double t = 0;
    double lr = 0;
    std::int64_t batch_size = 0;
  };
  /// The next step, or nothing when the run is over (`stop_reason_` says why).
  [[nodiscard]] std::optional<StepPlan> plan_step();
  /// The progress after a step of this plan, as far as it is known before the step.
  [[nodiscard]] Progress progress_after(const StepPlan& plan) const;
  /// All micro-steps of a batch and the update; false when a signal came, with the partial batch dropped.
  [[nodiscard]] bool run_step(const StepPlan& plan, StepRecord& record);
  void report(const StepPlan& plan, const StepRecord& record, const Progress& before);
  void check_sync();
  void evaluate();
  void save();
  void save_or_warn();
  [[nodiscard]] Summary finish();
  void announce_epoch(std::int64_t rows_after) const;

  TrainerParts parts_;
  const TrainConfig& train_;
  TrainingStep step_;
  BudgetClock clock_;
  Progress progress_;
  CheckpointFolder checkpoints_;
  MetricsFiles metrics_;
  ProgressLine progress_line_;
  Interval log_every_, eval_every_, save_every_;
  TrafficMeter traffic_;
  TrainingStep::Watch watch_;
  int stop_signal_ = 0;  ///< agreed by all ranks
  std::string stop_reason_;
  std::optional<EvalRecord> last_eval_;
  std::int64_t last_eval_step_ = -1;
  std::int64_t last_saved_step_ = -1;
  std::int64_t failed_saves_ = 0;
  Progress at_start_;
};

}  // namespace cram
