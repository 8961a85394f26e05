// The training clock and the budget it consumes.
//
// t of a step is the fraction of the budget consumed before it. Only rank 0 reads the clock, once a step; everything
// that depends on time (learning rate, batch size, the end) is a function of that t.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "base/options.h"

namespace cram {

/// What a run has consumed: state that is saved in checkpoints.
struct Progress {
  std::int64_t step = 0;              ///< completed optimizer updates
  std::int64_t consumed_samples = 0;  ///< rows, over all ranks
  std::int64_t tokens = 0;            ///< rows x S
  double elapsed_s = 0;               ///< training clock
  std::int64_t skipped = 0;           ///< steps skipped for non-finite gradients
  std::int64_t skipped_in_a_row = 0;
  std::int64_t attempt = 0;  ///< how often the run was resumed
  double excluded_s = 0;     ///< evaluation, final saves: not on the training clock
};

/// One line of a clock.log.
struct ReplayedStep {
  double fraction = 0;
  std::int64_t batch_size = 0;
};

/// Throws Error(kUsage) unless the clock exists, its log can be replayed and can consume a budget of that unit.
void check_clock(const Quantity& budget, const std::string& clock);

class BudgetClock {
 public:
  /// `clock`: wall, steps, tokens, virtual:S (S seconds a step) or replay:FILE (the fractions of a clock.log).
  BudgetClock(const Quantity& budget, const std::string& clock);

  /// Starts (or goes on) at `elapsed_s`; a process's start-up is not on the clock.
  void start(double elapsed_s);
  /// Takes what follows off the clock, until `resume`. Returns are nested by the caller, not here.
  void pause();
  /// Returns the seconds of the pause.
  double resume();

  /// Seconds on the training clock now: monotone, unaffected by changes of the system's time. The trainer stores it in
  /// progress.elapsed_s once a step, right after the step.
  [[nodiscard]] double elapsed_s(const Progress& progress) const;
  /// Consumed fraction of the budget before step progress.step + 1, a pure function of `progress`; may exceed 1.
  [[nodiscard]] double fraction(const Progress& progress) const;
  /// Replay only: false when the log has no line for the next step.
  [[nodiscard]] bool covers_next_step(const Progress& progress) const;
  /// Replay only: throws Error(kUsage) unless the log has this batch size for the next step.
  void check_replayed_batch(const Progress& progress, std::int64_t batch_size) const;

 private:
  [[nodiscard]] double running_s() const;
  Quantity budget_;
  enum class Kind { kWall, kSteps, kTokens, kVirtual, kReplay } kind_;
  double virtual_step_s_ = 0;
  std::vector<ReplayedStep> replay_;  // of step i+1
  double base_s_ = 0;
  std::chrono::steady_clock::time_point since_;
  bool running_ = false;
};

}  // namespace cram
