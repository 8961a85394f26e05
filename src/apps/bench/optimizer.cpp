// The optimizer step of a configuration's model (gradient norm, clipping, update, zeroing, bf16 copies) against
// streaming its bytes through memory once.
#include <ATen/core/grad_mode.h>
#include <torch/types.h>

#include <cmath>
#include <cstdio>

#include "apps/bench/bench.h"
#include "apps/bench/synthetic.h"
#include "base/log.h"
#include "run/metrics.h"
#include "train/training_step.h"

namespace cram {

BenchResult bench_optimizer(BenchContext& context) {
  const at::NoGradGuard no_grad;
  const Mesh mesh(context.world, layout_for(context.world.size(), 1, 1));
  const RunDescription run = resolve_synthetic(context, mesh.layout());
  const Config& config = run.config;
  const DeviceChoice& choice = run.device;
  ParameterStore store;
  const Model model(config.model, store, make_placement(config, mesh), config.train.objective);
  store.allocate(choice.precision, choice.device, state_layout(config.train.optimizer), make_partition(config, mesh));
  store.initialize(0);
  double bytes = 0;  // the norm reads the gradient; the update reads and writes state and gradient, and writes the copy
  for (const FlatBuffers& b : store.buffers()) {
    b.owned_grad.normal_();
    const bool copies = !b.working.is_same(b.master);
    bytes += 3.0 * static_cast<double>(b.owned_grad.nbytes()) + 2.0 * static_cast<double>(b.master.nbytes()) +
             2.0 * static_cast<double>(b.state_bytes()) + (copies ? static_cast<double>(b.working.nbytes()) : 0.0);
  }
  const TrainConfig& t = config.train;
  Optimizer optimizer(t.optimizer, store, training_step_settings(config).rule, mesh);
  const at::Tensor from =
      at::ones({static_cast<std::int64_t>(bytes / 2)}, at::TensorOptions().dtype(at::kByte).device(choice.device));
  const at::Tensor to = at::empty_like(from);
  constexpr int kCalls = 9;
  std::int64_t step = 1;
  double norm = 0;
  const double norm_s = median_time_s([&] { norm = std::sqrt(optimizer.own_sum_of_squares()); }, kCalls, choice.device);
  const double step_s = median_time_s(
      [&] {
        norm = std::sqrt(optimizer.own_sum_of_squares());
        optimizer.update({step++, 1e-4, clip_factor(norm, t.clip)});
      },
      kCalls, choice.device);
  const double stream_s = median_time_s([&] { to.copy_(from); }, kCalls, choice.device);
  say(choice.text(), "; ", format_count(static_cast<double>(parameter_count(config.model))), " parameters, ",
      format_count(bytes), "B a step");
  char line[160];
  std::snprintf(
      line, sizeof line,
      "  optimizer step %.2f ms (of it the norm %.2f ms); copying as many bytes %.2f ms, %.1f GB/s; ratio %.3f",
      1e3 * step_s, 1e3 * norm_s, 1e3 * stream_s, bytes / stream_s / 1e9, step_s / stream_s);
  say(line);
  BenchResult result;
  result.add("optimizer_ms", 1e3 * step_s);
  result.add("norm_ms", 1e3 * norm_s);
  result.add("stream_ms", 1e3 * stream_s);
  result.add("stream_ratio", step_s / stream_s);
  return result;
}

}  // namespace cram
