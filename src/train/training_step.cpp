#include "train/training_step.h"

#include <torch/types.h>

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/clock.h"
#include "parallel/agreement.h"
#include "run/signals.h"

namespace cram {
namespace {

constexpr double kAskEvery_s = 5;  // between two questions in a step whether a signal has come

}  // namespace

TrainingStepSettings training_step_settings(const Config& config) {
  const TrainConfig& t = config.train;
  return {micro_step_settings(config),
          config.parallel.overlap,
          t.optimizer,
          {t.beta1, t.beta2, t.eps, t.weight_decay},
          t.clip};
}

TrainingStep::TrainingStep(Model& model, ParameterStore& store, const Mesh& mesh, const TrainingStepSettings& settings,
                           BatchSource& source, std::unique_ptr<StepGraphs> graphs)
    : store_(store),
      mesh_(mesh),
      settings_(settings),
      sync_(make_grad_sync(store, mesh, settings.overlap)),
      micro_steps_(model, store, sync_, mesh, settings.micro_steps, source, std::move(graphs)),
      optimizer_(settings.optimizer, store, settings.rule, mesh) {}

int TrainingStep::agree_on_signal(const Watch& watch) const {
  return watch.signal ? static_cast<int>(agree_on_largest(mesh_.world(), watch.signal())) : 0;
}

TrainingStep::Exchanged TrainingStep::exchange(const MicroSteps::Totals& own, double micro_batch_s,
                                               const Watch& watch) const {
  const auto& signals = stop_signals();
  constexpr std::int64_t kNumbers = 5;
  const at::Tensor sums = at::zeros({kNumbers + static_cast<std::int64_t>(signals.size())}, at::kDouble);
  auto* s = sums.data_ptr<double>();
  if (mesh_.place().tp_rank == 0 && mesh_.is_last_stage()) {  // equal on tensor ranks: one of them adds
    s[0] = own.loss_sum;
    s[1] = own.count;
  }
  s[2] = optimizer_.own_sum_of_squares();
  if (mesh_.world().rank() == 0) {
    s[3] = watch.clock_s ? watch.clock_s() : 0;
    s[4] = micro_batch_s;
  }
  const int received = watch.signal ? watch.signal() : 0;
  for (std::size_t i = 0; i < signals.size(); ++i) s[kNumbers + static_cast<std::int64_t>(i)] = received == signals[i];
  mesh_.world().all_reduce_(sums);
  Exchanged all{s[0], s[1], s[2], s[3], s[4], 0};
  for (std::size_t i = 0; i < signals.size(); ++i) {
    if (s[kNumbers + static_cast<std::int64_t>(i)] > 0) all.signal = std::max(all.signal, signals[i]);
  }
  return all;
}

TrainingStep::Result TrainingStep::run(const Request& request, const Watch& watch) {
  Result result;
  const double from_s = steady_now_s();
  MicroSteps::Request steps{request.step, request.first_sample, request.micro_batches, /*exchange=*/true, {},
                            ask_every_};
  if (watch.signal) steps.ask = [&] { return PendingLargest(mesh_.world(), watch.signal()); };
  result.signal = static_cast<int>(micro_steps_.run_batch(steps));
  result.completed = result.signal == 0;
  result.data_wait_s = micro_steps_.totals().data_wait_s;
  if (!result.completed) {
    store_.zero_grad();
    return result;
  }
  const double computed_s = steady_now_s();
  sync_.finish();
  const double reduced_s = steady_now_s();
  if (watch.reduced) watch.reduced();
  result.compute_s = computed_s - from_s;
  result.reduce_s = reduced_s - computed_s;

  const Exchanged all =
      exchange(micro_steps_.totals(), result.compute_s / static_cast<double>(request.micro_batches), watch);
  result.signal = all.signal;
  result.clock_s = all.clock_s;
  result.count = all.count;
  result.loss = all.loss_sum / all.count;
  result.grad_norm = std::sqrt(all.sum_of_squares) / all.count;
  ask_every_ = std::max<std::int64_t>(
      1, static_cast<std::int64_t>(kAskEvery_s / std::max(all.micro_batch_s, kAskEvery_s / 1e9)));
  // The gradients are those of the loss sum; one factor turns them into the clipped gradient of the mean.
  result.finite = std::isfinite(result.grad_norm) && std::isfinite(result.loss);
  if (result.finite) {
    optimizer_.update({request.update, request.lr, clip_factor(result.grad_norm, settings_.clip) / all.count});
  } else {
    store_.zero_grad();
  }
  result.update_s = steady_now_s() - reduced_s;
  return result;
}

TrainingStep::Result TrainingStep::run(const Request& request) { return run(request, Watch()); }

void TrainingStep::accumulate(const Request& request) {
  const MicroSteps::Request steps{request.step, request.first_sample, request.micro_batches, /*exchange=*/false, {}, 1};
  (void)micro_steps_.run_batch(steps);  // nobody can ask it to stop
}

void TrainingStep::run_without_exchange(const Request& request, Result& result) {
  const double from_s = steady_now_s();
  accumulate(request);
  const double computed_s = steady_now_s();
  optimizer_.update({request.update, request.lr, 1e-6});
  result.completed = true;
  result.compute_s = computed_s - from_s;
  result.reduce_s = 0;
  result.update_s = steady_now_s() - computed_s;
}

}  // namespace cram
