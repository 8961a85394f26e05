// Where a step's time goes with several data ranks: computing, communication that hides behind it, communication that
// does not; and what these parts say about other numbers of ranks.
#include <ATen/core/grad_mode.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>

#include "apps/bench/bench.h"
#include "apps/bench/synthetic.h"
#include "base/clock.h"
#include "base/log.h"
#include "parallel/agreement.h"
#include "train/training_step.h"

namespace cram {
namespace {

double longest(Communicator& world, double seconds) {
  const at::Tensor value = at::full({1}, seconds, at::kDouble);
  world.all_reduce_(value, ReduceOp::kMax);
  return value.item<double>();
}

}  // namespace

BenchResult bench_parallel(BenchContext& context) {
  const at::NoGradGuard no_grad;
  Communicator& world = context.world;
  const Layout layout = layout_for(world.size(), static_cast<int>(context.config.parallel.tensor),
                                   static_cast<int>(context.config.parallel.pipeline));
  CRAM_CHECK(layout.data >= 2, ExitCode::kUsage, "cram_bench parallel measures data ranks, layout ", layout.text(),
             " has ", layout.data, ": start it with mpirun -n 2 or more");
  const RunDescription run = resolve_synthetic(context, layout);
  const Config& config = run.config;
  const DeviceChoice& choice = run.device;
  const Mesh mesh(world, layout);
  ParameterStore store;
  Model model(config.model, store, make_placement(config, mesh), config.train.objective);
  store.allocate(choice.precision, choice.device, state_layout(config.train.optimizer), make_partition(config, mesh));
  store.initialize(0);
  const std::int64_t micro_batches = config.train.batch_size / (config.train.micro_batch_size * layout.data);
  SyntheticBatches batches(config, mesh.place().dp_rank);

  struct Parts {
    double step_s = 0, exposed_s = 0, optimizer_s = 0;
  };
  // Steps with the exchange overlapped, after the last micro-batch, and without any.
  enum class Exchange { kOverlapped, kAfterwards, kNone };
  const auto steps = [&](Exchange exchange) {
    TrainingStepSettings settings = training_step_settings(config);
    settings.overlap = exchange == Exchange::kOverlapped;
    TrainingStep training_step(model, store, mesh, settings, batches);
    std::vector<double> step_s, exposed_s, optimizer_s;
    for (int step = 1; step <= 5; ++step) {
      world.barrier();
      const TrainingStep::Request request{.step = step, .update = step, .micro_batches = micro_batches, .lr = 1e-4};
      TrainingStep::Result result;
      if (exchange == Exchange::kNone) {
        training_step.run_without_exchange(request, result);
      } else {
        result = training_step.run(request);
      }
      if (step == 1) continue;  // memory is fresh
      step_s.push_back(longest(world, result.compute_s + result.reduce_s + result.update_s));
      exposed_s.push_back(longest(world, result.reduce_s));
      optimizer_s.push_back(longest(world, result.update_s));
    }
    return Parts{median(step_s), median(exposed_s), median(optimizer_s)};
  };
  const Parts none = steps(Exchange::kNone);
  const Parts afterwards = steps(Exchange::kAfterwards);
  const Parts overlapped = steps(Exchange::kOverlapped);

  // The exchange alone: latency from one small bucket, bandwidth from a large one.
  const auto exchange_s = [&](std::int64_t elements) {
    const at::Tensor bucket = at::zeros({elements}, at::TensorOptions().dtype(at::kFloat).device(choice.device));
    std::vector<double> seconds;
    for (int repeat = 0; repeat < 7; ++repeat) {
      world.barrier();
      const double from_s = steady_now_s();
      mesh.data().all_reduce_(bucket);
      seconds.push_back(longest(world, steady_now_s() - from_s));
    }
    return median(seconds);
  };
  const double latency_s = exchange_s(64);
  const double bucket_s = exchange_s(kBucketElements);
  double gradient_bytes = 0, buckets = 0;
  for (const FlatBuffers& b : store.buffers()) {
    gradient_bytes += static_cast<double>(b.grad.nbytes());
    buckets += static_cast<double>(b.buckets.size());
  }
  const double d = layout.data;
  const double bytes_per_s = 4.0 * static_cast<double>(kBucketElements) * 2 * (d - 1) / d / bucket_s;
  const double hidden_s = std::max(0.0, afterwards.step_s - overlapped.step_s);

  say("layout ", layout.text(), ", ", micro_batches, " micro-batches of ", config.train.micro_batch_size,
      " a rank, made-up rows (no shard is read); medians of 4 steps, slowest rank");
  const auto row = [](const char* what, double seconds) {
    char line[128];
    std::snprintf(line, sizeof line, "  %-46s %9.2f ms", what, 1e3 * seconds);
    say(line);
  };
  row("step without exchange (computing, optimizer)", none.step_s);
  row("step, exchange after the last micro-batch", afterwards.step_s);
  row("step, exchange overlapped", overlapped.step_s);
  row("exchange exposed when done afterwards", afterwards.exposed_s);
  row("exchange exposed when overlapped", overlapped.exposed_s);
  row("exchange hidden by overlapping", hidden_s);
  row("optimizer", none.optimizer_s);
  row("one bucket of 16 MiB", bucket_s);
  // T(d) = computing + what of the exchange the last backward pass cannot hide. Ring: 2(d-1)/d of the bytes and 2(d-1)
  // latencies a bucket. The measured share that was hidden here stands for what can be hidden.
  const double can_hide = afterwards.exposed_s > 0 ? std::clamp(hidden_s / afterwards.exposed_s, 0.0, 1.0) : 0;
  say("model: ", format_double(std::round(gradient_bytes / 1e4) / 100), " MB of gradients, ",
      format_double(std::round(bytes_per_s / 1e7) / 100), " GB/s, ", format_double(std::round(latency_s * 1e7) / 10),
      " us a message, ", format_double(std::round(can_hide * 100)), " % hidden");
  say("measured efficiency at dp", layout.data, ": ",
      format_double(std::round(1000 * none.step_s / overlapped.step_s) / 10), " %; what the parts say for others:");
  say("   dp  exchange ms  exposed ms  step ms  efficiency");
  BenchResult result;
  for (int ranks = 1; ranks <= 64; ranks *= 2) {
    const double ring = ranks - 1.0;
    const double total_s = gradient_bytes * 2 * ring / ranks / bytes_per_s + buckets * 2 * ring * latency_s / 2;
    const double exposed_s = (1 - can_hide) * total_s;
    const double efficiency = none.step_s / (none.step_s + exposed_s);
    char line[128];
    std::snprintf(line, sizeof line, "  %3d  %11.2f  %10.2f  %7.2f  %9.1f %%", ranks, 1e3 * total_s, 1e3 * exposed_s,
                  1e3 * (none.step_s + exposed_s), 100 * efficiency);
    say(line);
    if (ranks == 2 || ranks == 64) result.add("efficiency_dp" + std::to_string(ranks), efficiency);
  }
  result.add("efficiency_measured", none.step_s / overlapped.step_s);
  result.add("compute_ms", 1e3 * none.step_s);
  result.add("exposed_ms", 1e3 * overlapped.exposed_s);
  result.add("overlapped_ms", 1e3 * hidden_s);
  result.add("bandwidth_GBps", bytes_per_s / 1e9);
  return result;
}

}  // namespace cram
