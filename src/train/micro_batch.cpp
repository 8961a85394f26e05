#include "train/micro_batch.h"

#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <new>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "parallel/agreement.h"
#include "run/metrics.h"
#include "train/micro_batch_search.h"
#include "train/run_plan.h"
#include "train/synthetic_batches.h"
#include "train/training_step.h"

namespace cram {
namespace {

constexpr double kSearch_s = 60;    // no further size is begun that would not end within it
constexpr double kMeasure_s = 0.5;  // of a size, or kFewestSteps where they take longer
constexpr int kFewestSteps = 3, kMostSteps = 100;

std::string cache_key(const RunDescription& run) {
  return micro_batch_key(run.config, run.layout, concat(run.device.model_name, ", ", run.device.threads, " threads"));
}

// A model to measure with: its own, so that nothing of it is left when the run's is built.
struct Trial {
  ParameterStore store;
  Model model;

  Trial(const RunDescription& run, const Mesh& mesh)
      : model(run.config.model, store, make_placement(run.config, mesh), run.config.train.objective) {
    store.allocate(run.device.precision, run.device.device, state_layout(run.config.train.optimizer),
                   make_partition(run.config, mesh));
    store.initialize(0);
  }
};

// Seconds of one flush of micro-steps of this size, the same on every rank: rank 0's median. `stop` is collective.
double measure(const Config& config, const Mesh& mesh, Trial& trial, std::int64_t micro_batches,
               const std::function<bool()>& stop) {
  SyntheticBatches batches(config, mesh.place().dp_rank, /*pin_memory=*/trial.store.device().is_cuda());
  TrainingStep step(trial.model, trial.store, mesh, training_step_settings(config), batches);
  const auto flush = [&] {
    const double from_s = steady_now_s();
    step.accumulate({.micro_batches = micro_batches});
    (void)step.own_totals();  // waits for the device
    return steady_now_s() - from_s;
  };
  (void)flush();  // takes memory and makes kernels
  // As often as ranks agree on: small models need many for a steady figure.
  const double first_s = broadcast_value(mesh.world(), flush());
  const int more = std::clamp(static_cast<int>(kMeasure_s / first_s), kFewestSteps - 1, kMostSteps);
  std::vector<double> seconds = {first_s};
  for (int i = 0; i < more && !stop(); ++i) seconds.push_back(flush());
  std::sort(seconds.begin(), seconds.end());
  return broadcast_value(mesh.world(), seconds[seconds.size() / 2]);
}

}  // namespace

std::optional<std::int64_t> remembered_micro_batch(const RunDescription& run) {
  const std::vector<std::int64_t> candidates = micro_batch_candidates(run.config, run.layout);
  const std::optional<std::int64_t> known = MicroBatchCache(MicroBatchCache::default_file()).find(cache_key(run));
  return known && std::find(candidates.begin(), candidates.end(), *known) != candidates.end() ? known : std::nullopt;
}

std::int64_t choose_micro_batch(const RunDescription& run, const Mesh& mesh, const StopSignals& signals) {
  const Layout& layout = run.layout;
  const auto known = static_cast<std::int64_t>(
      broadcast_value(mesh.world(), static_cast<double>(remembered_micro_batch(run).value_or(kAutoMicroBatch))));
  if (known != kAutoMicroBatch) {
    say("train.micro_batch_size=auto: ", known, ", measured before for this device and model");
    return known;
  }
  const std::vector<std::int64_t> candidates = micro_batch_candidates(run.config, layout);
  say("train.micro_batch_size=auto: measuring sizes from ", candidates.front(), " to ", candidates.back());
  const double from_s = steady_now_s();
  std::optional<Trial> parts(std::in_place, run, mesh);
  const std::int64_t micro_batches = layout.pipeline == 1 ? 1 : 2 * layout.pipeline;
  double seconds_a_row = 0;
  bool interrupted = false;
  const auto stop = [&] { return interrupted = agree_on_largest(mesh.world(), signals.received()) != 0; };
  const auto tokens_per_s = [&](std::int64_t rows) -> std::optional<double> {
    const RunDescription trial = with_micro_batch(run, rows);
    // Enough memory on every rank, by estimate: a rank that ran out alone would leave the others waiting.
    const RunPlanned plan =
        plan_run(trial.config, layout, rows * layout.data * micro_batches, masked_in_row(trial.config));
    return_free_memory();  // what a smaller size used says nothing about this one
    const double needed = plan.stages[static_cast<std::size_t>(mesh.place().pp_rank)].activation_bytes;
    const bool fits = needed < free_memory_bytes(run.device);
    if (agree_on_largest(mesh.world(), fits ? 0 : 1) != 0) return std::nullopt;
    try {
      const double seconds = measure(trial.config, mesh, *parts, micro_batches, stop);
      seconds_a_row = seconds / static_cast<double>(rows);
      return static_cast<double>(rows * micro_batches * layout.data * run.config.model.seq_length) / seconds;
    } catch (const c10::OutOfMemoryError&) {
      if (mesh.world().size() > 1) throw;
    } catch (const std::bad_alloc&) {
      if (mesh.world().size() > 1) throw;
    }
    return std::nullopt;
  };
  const auto out_of_time = [&](std::int64_t next) {
    if (interrupted || stop()) return true;
    const double next_s = (kFewestSteps + 1) * seconds_a_row * static_cast<double>(next);
    return broadcast_value(mesh.world(), steady_now_s() - from_s + next_s) > kSearch_s;
  };
  const MicroBatchFound found = search_micro_batch(candidates, tokens_per_s, out_of_time);
  parts.reset();
  return_free_memory();
  if (interrupted) {  // the run itself ends before its first step
    say("train.micro_batch_size=auto: interrupted, nothing is remembered");
    return found.rows;
  }
  if (mesh.world().rank() == 0) {
    MicroBatchCache(MicroBatchCache::default_file()).remember(cache_key(run), found.rows);
  }
  const double search_s = broadcast_value(mesh.world(), steady_now_s() - from_s);
  std::string tried;
  for (const auto& [rows, speed] : found.tried) {
    tried += concat(tried.empty() ? "" : ", ", rows, ": ", format_grouped(std::llround(speed)));
  }
  say("train.micro_batch_size=auto: ", found.rows, " (tokens/s: ", tried, "; measured in ", std::llround(search_s),
      " s, outside the budget)");
  return found.rows;
}

}  // namespace cram
