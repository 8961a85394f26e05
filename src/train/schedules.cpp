#include "train/schedules.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/check.h"
#include "base/options.h"

namespace cram {
namespace {

// Rises linearly from `start` to 1 at three quarters of the budget, then falls linearly to 0.
double triangle(double start, double t) { return std::min(start + t * (1 - start) / 0.75, (1 - t) / 0.25); }
double dive(double fall, double t) { return std::min(1.0, (1 - t) / fall); }

struct TableRow {
  const char* name;
  double (*factor)(double t, double w, double c);
};

constexpr TableRow kShapes[] = {
    {"one-cycle", [](double t, double, double) { return 1 - std::abs(2 * t - 1); }},
    {"triangle1", [](double t, double, double) { return triangle(0.5, t); }},
    {"triangle2", [](double t, double, double) { return triangle(0.25, t); }},
    {"constant", [](double, double, double) { return 1.0; }},
    {"linear", [](double t, double w, double) { return (1 - t) / (1 - w); }},
    {"cosine", [](double t, double w, double) { return 0.5 * (1 + std::cos(std::numbers::pi * (t - w) / (1 - w))); }},
    {"inverse-sqrt", [](double t, double w, double) { return std::sqrt(w / t); }},
    {"dive-fast", [](double t, double, double) { return dive(0.25, t); }},
    {"dive", [](double t, double, double) { return dive(0.5, t); }},
    {"dive-slow", [](double t, double, double) { return dive(0.75, t); }},
    {"ramp", [](double t, double, double c) { return t <= 1 - c ? t : (1 - c) * (1 - t) / c; }},
};

}  // namespace

std::vector<std::string> schedule_names() {
  std::vector<std::string> names;
  for (const TableRow& row : kShapes) names.emplace_back(row.name);
  return names;
}

double schedule_factor(const ScheduleSettings& settings, double t) {
  const double progress = std::min(t, 1.0);
  if (progress < settings.warmup) return progress / settings.warmup;
  for (const TableRow& row : kShapes) {
    if (settings.shape == row.name) return std::max(0.0, row.factor(progress, settings.warmup, settings.peak_fraction));
  }
  fail(ExitCode::kUsage, "train.schedule=", settings.shape, " is unknown, the nearest is ",
       nearest_name(settings.shape, schedule_names()));
}

std::int64_t ramped_batch_size(std::int64_t batch_size, std::int64_t quantum, double ramp, double t) {
  if (ramp <= 0 || t >= ramp) return batch_size;
  const double quanta = std::floor(t / ramp * static_cast<double>(batch_size) / static_cast<double>(quantum) + 1);
  return std::min(batch_size, static_cast<std::int64_t>(quanta) * quantum);
}

}  // namespace cram
