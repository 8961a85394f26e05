// The training step of a configuration on made-up rows: tokens per second, where the time goes, and how far it is from
// what its matrix products alone would take through ATen, one by one, in the same run.
#include <ATen/core/grad_mode.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <string>

#include "apps/bench/bench.h"
#include "apps/bench/synthetic.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/profile.h"
#include "model/kernels/kernels.h"
#include "model/kernels/panels.h"
#include "train/device.h"
#include "train/training_step.h"

namespace cram {
namespace {

constexpr int kFewestSteps = 3;
constexpr int kProfiledSteps = 3;

struct Product {
  const char* name;
  std::int64_t rows, in, out;
  std::int64_t times;  // a micro-step
};

std::vector<Product> products_of(const Config& config, int tensor_ranks) {
  const ModelConfig& m = config.model;
  const std::int64_t tokens = config.train.micro_batch_size * m.seq_length;
  const std::int64_t masked = config.train.micro_batch_size * masked_in_row(config);
  const std::int64_t sparse = last_layer_is_sparse(m, tensor_ranks) ? 1 : 0, whole = m.layers - sparse;
  std::vector<Product> products = {{"query_key_value", tokens, m.hidden, 3 * m.hidden, m.layers},
                                   {"dense", tokens, m.hidden, m.hidden, whole},
                                   {"dense_in", tokens, m.hidden, m.ffn, whole},
                                   {"dense_out", tokens, m.ffn / 2, m.hidden, whole},
                                   {"last dense", masked, m.hidden, m.hidden, sparse},
                                   {"last dense_in", masked, m.hidden, m.ffn, sparse},
                                   {"last dense_out", masked, m.ffn / 2, m.hidden, sparse},
                                   {"decoder", masked, m.hidden, m.vocab_size, 1}};
  std::erase_if(products, [](const Product& p) { return p.times == 0; });
  return products;
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
  const auto time = [&](const std::function<void()>& call) { return median_time_s(call, 7, options.device()); };
  ProductTimes times;
  times.aten = {time([&] { (void)at::mm(x, w.t()); }), time([&] { (void)at::mm(dy, w); }),
                time([&] { (void)at::mm(dy.t(), x); })};
  if (!with_own) return times;
  const at::Tensor sum = at::zeros(w.sizes(), options.dtype(options.dtype() == at::kDouble ? at::kDouble : at::kFloat));
  kernels::WeightPanels panels;
  times.own = {time([&] { (void)kernels::product_transposed(x, w, panels); }),
               time([&] { (void)kernels::product(dy, w, panels); }),
               time([&] { kernels::add_transposed_product_(sum, dy, x); })};
  return times;
}

// What a GPU's tensor cores can do in dense bf16, FLOP/s.
struct Peak {
  double flops = 0;
  const char* source = "";
};

Peak peak_of(const DeviceChoice& choice) {
  const auto named = [&](const char* part) { return choice.device_name.find(part) != std::string::npos; };
  // Data sheets; forms with other clocks (PCIe, NVL) are measured.
  if (named("A100")) return {312e12, "data sheet of A100"};
  if ((named("H100") && named("HBM3")) || (named("H200") && !named("NVL")))
    return {989e12, "data sheet of H100/H200 SXM"};
  const at::TensorOptions options = at::TensorOptions().dtype(at::kBFloat16).device(choice.device);
  constexpr std::int64_t kSize = 8192;
  const at::Tensor a = at::randn({kSize, kSize}, options), b = at::randn({kSize, kSize}, options);
  const double seconds = median_time_s([&] { (void)at::mm(a, b); }, 5, choice.device);
  return {2.0 * kSize * kSize * kSize / seconds, "measured, a product of 8192 x 8192 x 8192"};
}

void say_row(const char* format, auto... values) {
  char line[160];
  std::snprintf(line, sizeof line, format, values...);
  say(line);
}

}  // namespace

BenchResult bench_gemm(BenchContext& context) {
  const at::NoGradGuard no_grad;
  const RunDescription run = resolve_synthetic(context, Layout{});
  const Config& config = run.config;
  const DeviceChoice& choice = run.device;
  const at::TensorOptions options = at::TensorOptions().dtype(working_type(choice.precision)).device(choice.device);
  say(choice.text());
  say("GFLOP/s of forward, input gradient, weight gradient: rows x in x out | ATen | own");
  BenchResult result;
  double flops = 0, aten_s = 0, own_s = 0;
  for (const Product& p : products_of(config, 1)) {
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
  const ParallelConfig& parallel = context.config.parallel;
  const Mesh mesh(context.world, layout_for(context.world.size(), static_cast<int>(parallel.tensor),
                                            static_cast<int>(parallel.pipeline)));
  const RunDescription run = resolve_synthetic(context, mesh.layout());
  const Config& config = run.config;
  const DeviceChoice& choice = run.device;
  say(choice.text());
  ParameterStore store;
  Model model(config.model, store, make_placement(config, mesh), config.train.objective);
  store.allocate(choice.precision, choice.device, state_layout(config.train.optimizer), make_partition(config, mesh));
  store.initialize(0);
  const TrainConfig& t = config.train;
  const std::int64_t micro_batches = t.batch_size / (t.micro_batch_size * mesh.layout().data);
  const bool gpu = choice.device.is_cuda();
  SyntheticBatches batches(config, mesh.place().dp_rank, /*pin_memory=*/gpu);
  const TrainingStepSettings settings = training_step_settings(config);
  std::optional<TrainingStep> training_step;
  training_step.emplace(model, store, mesh, settings, batches, make_step_graphs(run.graph, choice.device));
  double loss = 0;
  std::int64_t number = 0;
  const auto step = [&](TrainingStep& whole) {
    ++number;
    loss = whole.run({.step = number, .update = number, .micro_batches = micro_batches, .lr = 1e-4}).loss;
  };
  // A GPU's clock is read in a pass of its own, since every look at it waits for the device.
  std::optional<Profile> profile;
  if (!gpu) profile.emplace();
  // Memory, caches, and where there are graphs also these.
  const int first_steps = gpu ? StepGraphs::kWarmUps + 2 : 1;
  for (int i = 0; i < first_steps; ++i) step(*training_step);
  if (profile) profile->clear();
  std::vector<double> seconds;
  const double from_s = steady_now_s();
  while (seconds.size() < kFewestSteps || steady_now_s() - from_s < context.measure_s) {
    const double step_from_s = steady_now_s();
    step(*training_step);
    seconds.push_back(steady_now_s() - step_from_s);
  }
  double profiled_s = steady_now_s() - from_s;
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
  if (gpu) {
    const Peak peak = peak_of(choice);
    const double share = tokens / step_s * flops_per_token / (peak.flops * mesh.world().size());
    say_row("  model FLOP utilisation %.1f %% of %.0f TFLOP/s of dense bf16 a GPU (%s)", 100 * share, peak.flops / 1e12,
            peak.source);
    result.add("mfu", share);
    training_step.reset();  // the graph's memory is a step's
    TrainingStep eager(model, store, mesh, settings, batches);
    step(eager);
    profile.emplace(wait_for_device);
    wait_for_device();
    const double profile_from_s = steady_now_s();
    for (int i = 0; i < kProfiledSteps; ++i) step(eager);
    wait_for_device();
    profiled_s = steady_now_s() - profile_from_s;
    say_row("  parts of a step without graphs that waits for the device at each of them, %.1f ms:",
            1e3 * profiled_s / kProfiledSteps);
  }
  // The parts are those of the measured steps, or on a GPU of the pass above.
  const double parts_step_s = gpu ? profiled_s / kProfiledSteps : step_s;
  double listed = 0;
  for (int i = 0; i < static_cast<int>(Section::kCount); ++i) {
    const auto section = static_cast<Section>(i);
    const double share = profile->seconds(section) / profiled_s;
    listed += share;
    say_row("  %-12s %5.1f %%  %8.2f ms", section_name(section), 100 * share, 1e3 * share * parts_step_s);
    result.add(std::string(section_name(section)) + "_share", share);
  }
  say_row("  %-12s %5.1f %%  %8.2f ms", "other", 100 * (1 - listed), 1e3 * (1 - listed) * parts_step_s);
  // The products of the whole model: no bound for ranks that have a part of it each.
  if (mesh.layout().tensor > 1 || mesh.layout().pipeline > 1) return result;
  const at::TensorOptions options = at::TensorOptions().dtype(working_type(choice.precision)).device(choice.device);
  double gemm_s = 0;
  for (const Product& p : products_of(config, mesh.layout().tensor)) {
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
