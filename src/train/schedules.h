// Learning-rate shapes and the batch ramp: pure functions of t, the consumed fraction of the budget. What t counts
// (wall clock, steps, tokens) is the clock's business, see budget_clock.h.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace cram {

struct ScheduleSettings {
  std::string shape = "triangle2";
  double warmup = 0;         ///< w: fraction of the budget; factor t/w while t < w
  double peak_fraction = 0;  ///< c of "ramp": (1-c)(1-t)/c
};

/// Names of all shapes.
[[nodiscard]] std::vector<std::string> schedule_names();

/// Factor on the peak learning rate at t >= 0; never negative. Throws Error(kUsage) for an unknown shape.
/// triangle1, triangle2: Geiping & Goldstein 2023 and its public code (percentage schedules); the rest:
/// docs/decisions.md.
[[nodiscard]] double schedule_factor(const ScheduleSettings& settings, double t);

/// Rows of the batch at t: min(batch, floor(t/ramp * batch/quantum + 1) * quantum) until t reaches `ramp`, then
/// `batch`; ramp 0 is off.
[[nodiscard]] std::int64_t ramped_batch_size(std::int64_t batch_size, std::int64_t quantum, double ramp, double t);

}  // namespace cram
