#include "train/trainer.h"

#include <torch/types.h>

#include <cmath>
#include <filesystem>

#include "base/clock.h"
#include "base/log.h"
#include "train/replicas.h"
#include "train/schedules.h"

namespace cram {
namespace {

constexpr std::int64_t kSkipsThatHalt = 5;

}  // namespace

Trainer::Trainer(TrainerParts parts)
    : parts_(std::move(parts)),
      train_(parts_.run.config.train),
      step_(parts_.model, parts_.store, parts_.mesh, training_step_settings(parts_.run.config), parts_.batches,
            make_step_graphs(parts_.run.graph, parts_.store.device())),
      clock_(train_.budget, train_.clock),
      progress_(parts_.checkpoint_info.progress),
      checkpoints_(parts_.run_folder + "/checkpoints"),
      metrics_(parts_.run_folder, parts_.mesh.world().rank() == 0),
      progress_line_(train_.budget, progress_.elapsed_s),
      log_every_(parts_.run.config.log.every),
      eval_every_(parts_.run.config.eval.every),
      save_every_(parts_.run.config.checkpoint.every),
      traffic_(parts_.mesh, parts_.run.config, masked_in_row(parts_.run.config)),
      at_start_(progress_) {
  watch_.signal = [this] { return parts_.signals.received(); };
}

Summary Trainer::run() {
  if (progress_.attempt > 0) metrics_.event("started again", concat("after step ", progress_.step), progress_);
  using Phase = PendingOperations::Phase;
  PendingOperations& pending = parts_.mesh.world().pending();
  pending.set_phase(Phase::kTraining);
  clock_.start(progress_.elapsed_s);
  stop_signal_ = step_.agree_on_signal(watch_);
  while (const std::optional<StepPlan> plan = plan_step()) {
    const Progress before = progress_;
    pending.set_step(progress_.step + 1);
    StepRecord record;
    if (!run_step(*plan, record)) continue;  // a signal: plan_step ends the run
    pending.step_finished(record.step_s);
    report(*plan, record, before);
    check_sync();
    if (eval_every_.crossed(before, progress_)) evaluate();
    if (save_every_.crossed(before, progress_)) save_or_warn();
  }
  return finish();
}

void Trainer::check_sync() {
  const std::int64_t every = parts_.run.config.parallel.check_sync;
  if (every > 0 && progress_.step % every == 0) check_replicas(parts_.store, parts_.mesh, progress_.step);
}

Progress Trainer::progress_after(const StepPlan& plan) const {
  Progress after = progress_;
  after.step += 1;
  after.consumed_samples += plan.batch_size;
  after.tokens += plan.batch_size * parts_.run.config.model.seq_length;
  return after;
}

std::optional<Trainer::StepPlan> Trainer::plan_step() {
  const double t = clock_.fraction(progress_);
  const Quantity& stop_after = parts_.run.config.run.stop_after;
  if (stop_signal_ != 0) {
    stop_reason_ = signal_name(stop_signal_);
  } else if (t >= 1) {
    stop_reason_ = clock_.covers_next_step(progress_) ? "budget" : "replay ends";
  } else if (stop_after.value > 0 && static_cast<double>(progress_.step) >= stop_after.value) {
    stop_reason_ = "stop_after";
  } else {
    const ScheduleSettings schedule{train_.schedule, train_.warmup, train_.peak_fraction};
    const StepPlan plan{t, train_.lr * schedule_factor(schedule, t),
                        ramped_batch_size(train_.batch_size, train_.batch_quantum, train_.batch_ramp, t)};
    clock_.check_replayed_batch(progress_, plan.batch_size);
    return plan;
  }
  return std::nullopt;
}

bool Trainer::run_step(const StepPlan& plan, StepRecord& record) {
  const double start_s = steady_now_s();
  traffic_.begin_step();
  Progress after = progress_after(plan);
  watch_.clock_s = [&] { return clock_.elapsed_s(after); };
  const TrainingStep::Result result =
      step_.run({.step = after.step,
                 .update = after.step - progress_.skipped,
                 .first_sample = progress_.consumed_samples,
                 .micro_batches = plan.batch_size / (train_.micro_batch_size * parts_.mesh.layout().data),
                 .lr = plan.lr},
                watch_);
  stop_signal_ = result.signal;
  if (!result.completed) return false;
  record.loss = result.loss;
  record.grad_norm = result.grad_norm;
  record.data_wait_s = result.data_wait_s;
  after.elapsed_s = result.clock_s;
  if (result.finite) {
    after.skipped_in_a_row = 0;
  } else {
    const std::string what = concat("step ", after.step, ": loss ", record.loss, ", gradient norm ", record.grad_norm);
    after.skipped += 1;
    after.skipped_in_a_row += 1;
    metrics_.event("non-finite", what, progress_);
    CRAM_CHECK(train_.on_nonfinite == "skip" && after.skipped_in_a_row < kSkipsThatHalt, ExitCode::kNonFinite, what,
               " is not finite (", after.skipped_in_a_row,
               " in a row); lower train.lr and resume from the last checkpoint");
    log_warning(what, " is not finite: the update is skipped");
  }
  progress_ = after;
  traffic_.end_step(plan.batch_size);
  record.step_s = steady_now_s() - start_s;
  return true;
}

void Trainer::report(const StepPlan& plan, const StepRecord& measured, const Progress& before) {
  StepRecord record = measured;
  record.step = progress_.step;
  record.fraction = plan.t;
  record.lr = plan.lr;
  record.batch_size = plan.batch_size;
  record.tokens_per_s = static_cast<double>(progress_.tokens - before.tokens) / record.step_s;
  const double fraction = clock_.fraction(progress_);
  const double left_s = fraction > 0 ? progress_.elapsed_s * (1 - std::min(fraction, 1.0)) / fraction : NAN;
  metrics_.train(record, progress_, fraction, left_s);
  const std::string line = progress_line_.text(record, progress_, fraction, left_s);
  const bool first = before.step == at_start_.step;
  if (first || log_every_.crossed(before, progress_)) {
    say(line);
  } else {
    live_line(line);
  }
  announce_epoch(before.consumed_samples);
}

void Trainer::announce_epoch(std::int64_t consumed_before) const {
  const std::int64_t rows = parts_.rows_an_epoch;
  if (consumed_before / rows != progress_.consumed_samples / rows) {
    log_info("epoch ", progress_.consumed_samples / rows + 1, " starts: the ", rows,
             " rows are read again with new masks");
  }
}

void Trainer::evaluate() {
  const PhaseScope phase(parts_.mesh.world().pending(), PendingOperations::Phase::kEvaluating);
  clock_.pause();
  last_eval_ = parts_.evaluate();
  last_eval_step_ = progress_.step;
  progress_.excluded_s += clock_.resume();
  metrics_.eval(*last_eval_, progress_);
}

void Trainer::save() {
  if (last_saved_step_ == progress_.step) return;
  const PhaseScope phase(parts_.mesh.world().pending(), PendingOperations::Phase::kSaving);
  parts_.checkpoint_info.progress = progress_;
  const double start_s = steady_now_s();
  // Data ranks hold equal weights; the first of them writes, or each its part of what is shared out.
  const std::uintmax_t bytes =
      checkpoints_.save(parts_.store, parts_.checkpoint_info, parts_.run.config.checkpoint.keep, parts_.mesh.world(),
                        /*writes=*/parts_.mesh.place().dp_rank == 0 || parts_.run.config.parallel.zero > 0);
  last_saved_step_ = progress_.step;
  progress_line_.saved(progress_.elapsed_s);
  metrics_.event("saved", concat("step ", progress_.step, ", ", bytes, " bytes, ", steady_now_s() - start_s, " s"),
                 progress_);
}

void Trainer::save_or_warn() {
  try {
    save();
    failed_saves_ = 0;
  } catch (const Error& error) {
    if (++failed_saves_ >= parts_.run.config.checkpoint.max_failures) throw;
    metrics_.event("save failed", error.what(), progress_);
    log_warning("checkpoint not saved (", failed_saves_, " of ", parts_.run.config.checkpoint.max_failures,
                " failures before the run stops): ", error.what());
  }
}

Summary Trainer::finish() {
  live_line("");
  const bool preempted = stop_signal_ != 0;
  clock_.pause();
  if (preempted)
    say(stop_reason_, ": saving step ", progress_.step, " and leaving; run the same command again to resume");
  save();
  const bool ended = stop_reason_ == "budget" || stop_reason_ == "replay ends";
  if (ended && last_eval_step_ != progress_.step) {
    const PhaseScope phase(parts_.mesh.world().pending(), PendingOperations::Phase::kEvaluating);
    last_eval_ = parts_.evaluate();
    metrics_.eval(*last_eval_, progress_);
  }
  progress_.excluded_s += clock_.resume();
  Summary summary;
  summary.reason = stop_reason_;
  summary.progress = progress_;
  const double trained_s = progress_.elapsed_s - at_start_.elapsed_s;
  summary.tokens_per_s = trained_s > 0 ? static_cast<double>(progress_.tokens - at_start_.tokens) / trained_s : 0;
  summary.lr_end = train_.lr * schedule_factor({train_.schedule, train_.warmup, train_.peak_fraction}, 1);
  summary.eval = last_eval_;
  if (parts_.mesh.world().size() > 1) summary.traffic = traffic_.totals();
  metrics_.summary(summary);
  return summary;
}

}  // namespace cram
