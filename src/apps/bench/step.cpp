// The training step of a configuration on made-up rows: tokens per second, where the time goes, and how far it is from
// what its matrix products alone would take through ATen, one by one, in the same run.
#include <ATen/core/grad_mode.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "apps/bench/bench.h"
#include "apps/bench/synthetic.h"
#include "base/log.h"
#include "base/profile.h"
#include "model/kernels/kernels.h"
#include "model/kernels/panels.h"
#include "train/device.h"
#include "train/micro_steps.h"
#include "train/optimizer.h"

namespace cram {
namespace {

constexpr int kFewestSteps = 3;

struct Product {
  const char* name;
  std::int64_t rows, in, out;
  std::int64_t times;  // a micro-step
};

std::vector<Product> products_of(const Config& config) {
  const ModelConfig& m = config.model;
  const std::int64_t tokens = config.train.micro_batch_size * m.seq_length;
  return {{"query_key_value", tokens, m.hidden, 3 * m.hidden, m.layers},
          {"dense", tokens, m.hidden, m.hidden, m.layers},
          {"dense_in", tokens, m.hidden, m.ffn, m.layers},
          {"dense_out", tokens, m.ffn / 2, m.hidden, m.layers},
          {"decoder", config.train.micro_batch_size * masked_in_row(config), m.hidden, m.vocab_size, 1}};
}

// Seconds of one product's three forms.
struct GemmTimes {
  double forward_s = 0, input_grad_s = 0, weight_grad_s = 0;
  [[nodiscard]] double all_s() const { return forward_s + input_grad_s + weight_grad_s; }
};

// Through ATen, and through the encoder's own door, whose weight gradient is summed in the gradient's format.
struct ProductTimes {
  GemmTimes aten, own;
};

ProductTimes time_product(const Product& p, const at::TensorOptions& options, bool with_own) {
  const at::Tensor x = at::randn({p.rows, p.in}, options), w = at::randn({p.out, p.in}, options);
  const at::Tensor dy = at::randn({p.rows, p.out}, options);
  constexpr int kCalls = 7;
  ProductTimes times;
  times.aten = {median_time_s([&] { (void)at::mm(x, w.t()); }, kCalls),
                median_time_s([&] { (void)at::mm(dy, w); }, kCalls),
                median_time_s([&] { (void)at::mm(dy.t(), x); }, kCalls)};
  if (!with_own) return times;
  const at::Tensor sum = at::zeros(w.sizes(), options.dtype(options.dtype() == at::kDouble ? at::kDouble : at::kFloat));
  kernels::WeightPanels panels;
  times.own = {median_time_s([&] { (void)kernels::product_transposed(x, w, panels); }, kCalls),
               median_time_s([&] { (void)kernels::product(dy, w, panels); }, kCalls),
               median_time_s([&] { kernels::add_transposed_product_(sum, dy, x); }, kCalls)};
  return times;
}

void say_row(const char* format, auto... values) {
  char line[160];
  std::snprintf(line, sizeof line, format, values...);
  say(line);
}

}  // namespace

BenchResult bench_gemm(BenchContext& context) {
  const at::NoGradGuard no_grad;
  Config& config = context.config;
  prepare_synthetic(config, Layout{});
  const DeviceChoice choice = choose_device(config, available_processors(false), context.launch.local_rank);
  const at::TensorOptions options = at::TensorOptions().dtype(working_type(choice.precision)).device(choice.device);
  say(choice.reason);
  say("GFLOP/s of forward, input gradient, weight gradient: rows x in x out | ATen | own");
  BenchResult result;
  double flops = 0, aten_s = 0, own_s = 0;
  for (const Product& p : products_of(config)) {
    const ProductTimes t = time_product(p, options, /*with_own=*/true);
    const double one = 2.0 * static_cast<double>(p.rows) * static_cast<double>(p.in) * static_cast<double>(p.out);
    const auto rate = [&](double seconds) { return one / seconds / 1e9; };
    say_row("  %-16s %6lld x %5lld x %5lld | %6.0f %6.0f %6.0f | %6.0f %6.0f %6.0f", p.name,
            static_cast<long long>(p.rows), static_cast<long long>(p.in), static_cast<long long>(p.out),
            rate(t.aten.forward_s), rate(t.aten.input_grad_s), rate(t.aten.weight_grad_s), rate(t.own.forward_s),
            rate(t.own.input_grad_s), rate(t.own.weight_grad_s));
    flops += 3 * one * static_cast<double>(p.times);
    aten_s += t.aten.all_s() * static_cast<double>(p.times);
    own_s += t.own.all_s() * static_cast<double>(p.times);
  }
  result.add("gemm_gflops", flops / aten_s / 1e9);
  result.add("own_gflops", flops / own_s / 1e9);
  result.add("own_ratio", aten_s / own_s);
  return result;
}

BenchResult bench_step(BenchContext& context) {
  const at::NoGradGuard no_grad;
  Config& config = context.config;
  config.train.batch_ramp = 0;
  const Mesh mesh(context.world, layout_for(context.world.size(), static_cast<int>(config.parallel.tensor),
                                            static_cast<int>(config.parallel.pipeline)));
  prepare_synthetic(config, mesh.layout());
  const DeviceChoice choice = choose_device(
      config, std::max(1, available_processors(context.launch.local_size == 1) / context.launch.local_size),
      context.launch.local_rank);
  say(choice.reason);
  ParameterStore store;
  Encoder encoder(config.model, store, make_placement(config, mesh));
  store.allocate(choice.precision, choice.device, true, make_partition(config, mesh));
  store.initialize(0);
  const TrainConfig& t = config.train;
  const std::int64_t micro_batches = t.batch_size / (t.micro_batch_size * mesh.layout().data);
  SyntheticBatches batches(config, mesh.place().dp_rank);
  GradSync sync = make_grad_sync(store, mesh, config.parallel.overlap);
  MicroSteps micro_steps(encoder, store, sync, mesh, config, [&] { return batches.next(); });
  Optimizer optimizer(store, {t.beta1, t.beta2, t.eps, t.weight_decay, t.clip}, mesh);
  Profile profile;
  double loss = 0;
  const auto step = [&](std::int64_t number) {
    (void)micro_steps.run_batch(number, 0, micro_batches);
    sync.finish();
    const MicroSteps::Totals totals = micro_steps.totals();
    loss = totals.loss_sum / std::max(1.0, totals.masked);
    const double norm = optimizer.grad_norm() / std::max(1.0, totals.masked);
    optimizer.update(number, 1e-4, clip_factor(norm, t.clip) / std::max(1.0, totals.masked));
  };
  step(1);
  profile.clear();
  std::vector<double> seconds;
  const double from_s = bench_now_s();
  std::int64_t number = 2;
  while (seconds.size() < kFewestSteps || bench_now_s() - from_s < context.measure_s) {
    const double step_from_s = bench_now_s();
    step(number++);
    seconds.push_back(bench_now_s() - step_from_s);
  }
  const double all_s = bench_now_s() - from_s;
  const double step_s = median(seconds);
  const double tokens = static_cast<double>(t.batch_size * config.model.seq_length);
  const double flops_per_token = train_flops_per_token(config.model, masked_in_row(config));
  say(micro_batches, " micro-batches of ", t.micro_batch_size, " a step, ", seconds.size(), " steps, loss ", loss);
  say_row("  step %.1f ms, %.0f tokens/s, %.1f GFLOP/s of the model", 1e3 * step_s, tokens / step_s,
          tokens / step_s * flops_per_token / 1e9);
  BenchResult result;
  result.add("tokens_per_s", tokens / step_s);
  result.add("step_ms", 1e3 * step_s);
  result.add("model_gflops", tokens / step_s * flops_per_token / 1e9);
  double listed = 0;
  for (int i = 0; i < static_cast<int>(Section::kCount); ++i) {
    const auto section = static_cast<Section>(i);
    const double share = profile.seconds(section) / all_s;
    listed += share;
    say_row("  %-12s %5.1f %%  %8.2f ms", section_name(section), 100 * share, 1e3 * share * step_s);
    result.add(std::string(section_name(section)) + "_share", share);
  }
  say_row("  %-12s %5.1f %%  %8.2f ms", "other", 100 * (1 - listed), 1e3 * (1 - listed) * step_s);
  const at::TensorOptions options = at::TensorOptions().dtype(working_type(choice.precision)).device(choice.device);
  double gemm_s = 0;
  for (const Product& p : products_of(config)) {
    gemm_s += time_product(p, options, /*with_own=*/false).aten.all_s() * static_cast<double>(p.times);
  }
  gemm_s *= static_cast<double>(micro_batches);
  const double fraction = gemm_s / step_s;
  say_row("  its matrix products alone through ATen, one by one: %.1f ms; the step reaches %.3f of that speed",
          1e3 * gemm_s, fraction);
  result.add("gemm_bound_fraction", fraction);
  return result;
}

}  // namespace cram
