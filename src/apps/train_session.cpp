#include "apps/train_session.h"

#include <ATen/core/grad_mode.h>
#include <torch/types.h>

#include <filesystem>
#include <sstream>

#include "apps/train_report.h"
#include "base/log.h"
#include "eval/mlm.h"
#include "parallel/agreement.h"
#include "parallel/mesh.h"
#include "parallel/watchdog.h"
#include "train/micro_batch.h"
#include "train/micro_batch_search.h"
#include "train/run_plan.h"
#include "train/shared_rows.h"
#include "train/trainer.h"

namespace cram {
namespace {

// Each shard is opened by one rank of the job.
TrainData open_data(const DataConfig& data, bool verify_all, Communicator& world) {
  CRAM_CHECK(!data.shards.empty(), ExitCode::kUsage, "data.shards is empty; name a folder made by cram_data pack");
  ShardSetOptions options;
  options.verify_all = verify_all || data.verify == "full";
  options.skip_bad_shards = data.on_bad_shard == "skip";
  const auto exchange = [&](const std::string& own) {
    std::string all;
    for (const std::string& text : gather_text_to_root(world, own)) all += text;
    return broadcast_text(world, all);
  };
  PreparedShards both = open_prepared(data.shards, options, {world.rank(), world.size(), exchange});
  return {std::make_shared<ShardSet>(std::move(both.train)), std::make_shared<ShardSet>(std::move(both.validation))};
}

DataShape shape_of(const ShardSet& shards) {
  return {shards.vocab_size(), shards.seq_length(), shards.folder(), shards.tokenizer_digest()};
}

// Warns about what changed since a checkpoint was made; refuses what must not.
void accept_checkpoint(const CheckpointFolder::Found& found, const OptionTable& options, const std::string& run_folder,
                       const CheckpointInfo& now, bool force) {
  std::vector<std::string> changes = changed_settings(found.info.settings, options, now.settings);
  for (const auto& [what, digest] : now.identity) {
    const auto saved = found.info.identity.find(what);
    if (saved != found.info.identity.end() && saved->second != digest) {
      changes.push_back(concat(what, ": the run has ", saved->second, ", this command ", digest));
    }
  }
  std::string diff;
  for (const std::string& change : changes) diff += "\n  " + change;
  CRAM_CHECK(changes.empty() || force, ExitCode::kUsage, "the run in ", run_folder,
             " was made with other settings:", diff,
             "\nrun it as it was, choose another run.output, or go on all the same with --force");
  if (!changes.empty()) log_warning("--force: resuming with other settings:", diff);
  std::string differences;
  for (const auto& [what, value] : now.environment) {
    const auto saved = found.info.environment.find(what);
    if (what != "host" && saved != found.info.environment.end() && saved->second != value) {
      differences += concat(" ", what, " ", saved->second, " -> ", value, ";");
    }
  }
  if (!differences.empty()) log_warning("resuming in another environment, last digits may differ:", differences);
  say("resuming from ", found.path);
}

// auto on a resume is the size the run was stored with, or the nearest one that this layout can do.
std::int64_t micro_batch_of(const CheckpointInfo& saved, const RunDescription& run) {
  const auto size = saved.settings.find("train.micro_batch_size");
  if (run.has_micro_batch() || size == saved.settings.end()) return run.config.train.micro_batch_size;
  const std::int64_t rows = nearest_micro_batch(
      run.config, run.layout, parse_integer(size->second, "train.micro_batch_size of the checkpoint"));
  say("train.micro_batch_size=auto: ", rows, ", the run's own is ", size->second);
  return rows;
}

void warn_if_disk_is_small(const Config& config, const ParameterStore& store, const std::string& folder) {
  std::error_code error;
  const std::uintmax_t free = std::filesystem::space(folder, error).available;
  const std::uintmax_t needed = checkpoint_bytes(store) * static_cast<std::uintmax_t>(config.checkpoint.keep + 1);
  if (!error && free < needed) {
    log_warning("checkpoints may not fit: ", folder, " has ", free, " bytes free, ", config.checkpoint.keep,
                " kept and one in the making need ", needed);
  }
}

// Every byte of tensors, shared out over the ranks.
int verify_run(Communicator& world, const Config& config) {
  say("data: every shard matches its digest");
  std::string all;
  on_root(world, [&] {
    for (const std::string& step : CheckpointFolder(RunFolder(config.run.output).checkpoints()).committed()) {
      all += step + "\n";
    }
  });
  std::istringstream steps(broadcast_text(world, all));
  bool any = false;
  for (std::string step; std::getline(steps, step); any = true) {
    (void)verify_checkpoint(step, world);
    say("checkpoint ", step, " verifies");
  }
  if (!any) say("no committed checkpoint in ", config.run.output);
  return 0;
}

// Who is where: one line a rank on rank 0's terminal and log.
void print_ranks(const Mesh& mesh, const DeviceChoice& choice, const Launch& launch) {
  if (mesh.world().size() == 1) return;
  const MeshCoordinates& place = mesh.place();
  const std::vector<std::string> all = gather_text_to_root(
      mesh.world(), concat("host ", choice.host, ", ", choice.device_name, ", ", choice.threads, " threads, tensor ",
                           place.tp_rank, ", data ", place.dp_rank, ", stage ", place.pp_rank));
  say("started by ", launch.launcher, ": ", mesh.world().size(), " ranks, layout ", mesh.layout().text());
  for (std::size_t rank = 0; rank < all.size(); ++rank) say("  rank ", rank, ": ", all[rank]);
}

// Groups of the mesh move the device's tensors: on a GPU by NCCL, or by MPI through host memory when asked for.
// nullptr: the control plane does it.
std::unique_ptr<Communicator> make_device_world(Communicator& world, const Config& config, const DeviceChoice& choice) {
  if (world.size() == 1) return nullptr;
  if (config.parallel.staging) return make_staged_communicator(world.split(0, world.rank(), "world"));
  if (!choice.device.is_cuda()) return nullptr;
  CRAM_CHECK(config.parallel.virtual_stages == 1, ExitCode::kUsage,
             "parallel.virtual_stages=", config.parallel.virtual_stages,
             " needs sends in the background, which NCCL's streams have not; use 1, or ", "parallel.staging=true");
  return make_nccl_communicator(world, choice.device);
}

LoaderSettings loader_settings(const RunDescription& run, const Mesh& mesh) {
  LoaderSettings settings;
  settings.dp_rank = mesh.place().dp_rank;
  settings.dp_size = mesh.layout().data;
  settings.micro_batch = run.config.train.micro_batch_size;
  settings.seed = static_cast<std::uint64_t>(run.config.run.seed);
  settings.mask_rate = run.config.train.mask_rate;
  settings.shuffle = run.config.data.shuffle;
  settings.pin_memory = run.device.device.is_cuda();
  return settings;
}

struct OpenedRun {
  CheckpointFolder checkpoints;
  std::unique_ptr<RunFolder> folder;             // rank 0's
  std::optional<CheckpointFolder::Found> found;  // rank 0's; the newest that looks whole
  bool resumes = false;
  std::int64_t micro_batch = 0;  // may still be auto
};

// The run folder is rank 0's business; the others learn where to resume from. Fills in info.progress. Nothing in the
// folder says yet that it is a run of these settings.
OpenedRun open_run(Communicator& world, const RunDescription& run, const OptionTable& options,
                   const TrainRequest& request, CheckpointInfo& info, const std::function<void()>& introduce) {
  const std::string& output = run.config.run.output;
  OpenedRun opened{CheckpointFolder(output + "/checkpoints"), nullptr, {}, false, run.config.train.micro_batch_size};
  on_root(world, [&] {
    introduce();
    opened.folder = std::make_unique<RunFolder>(output);
    if (request.fresh) opened.folder->set_aside();
    opened.folder->lock();
    const std::int64_t attempt = next_attempt(output);
    if (!opened.folder->is_new()) opened.found = opened.checkpoints.newest();
    if (opened.found) {
      accept_checkpoint(*opened.found, options, output, info, request.force);
      info.progress = opened.found->info.progress;
      // Before the first step no number depends on it: a search that a signal ended is made again.
      if (info.progress.step > 0) opened.micro_batch = micro_batch_of(opened.found->info, run);
    } else if (!opened.folder->is_new()) {
      say("no committed checkpoint in ", output, ": starting at step 0");
    }
    info.progress.attempt = attempt;
    opened.folder->open();
    clear_roll_call(output + "/logs", world.size());
  });
  opened.resumes = agree_on_largest(world, opened.found ? 1 : 0) > 0;
  info.progress = parse_progress(broadcast_text(world, progress_text(info.progress)));
  opened.micro_batch = agree_on_largest(world, opened.micro_batch);
  if (world.rank() > 0) open_log_file(rank_log_path(output, world.rank()));
  return opened;
}

int dry_run(const RunDescription& resolved, const Launch& launch, const TrainData& data) {
  std::int64_t rows = resolved.config.train.micro_batch_size;
  if (!resolved.has_micro_batch()) {
    const std::optional<std::int64_t> measured = remembered_micro_batch(resolved);
    rows = measured ? *measured : nearest_micro_batch(resolved.config, resolved.layout, TrainConfig().micro_batch_size);
    say("train.micro_batch_size=auto",
        measured ? ", measured before: " : " is measured when the run starts; planned with ", rows);
  }
  const RunDescription run = with_micro_batch(resolved, rows);
  const RunPlanned plan = plan_run(run.config, run.layout, run.config.train.batch_size, masked_in_row(run.config));
  if (launch.rank > 0) return 0;
  print_start(run, launch, data);
  say(describe_plan(plan, run.config, run.layout));
  say("dry run: nothing was allocated or written");
  return 0;
}

// Loads the newest whole checkpoint; progress becomes that of the one that was loaded.
void resume(OpenedRun& opened, ParameterStore& store, const RunDescription& run, const OptionTable& options,
            const TrainRequest& request, const Mesh& mesh, CheckpointInfo& info) {
  const LoadRule rule{.elsewhere = parameter_names(run.config.model, run.config.train.objective)};
  const std::int64_t attempt = info.progress.attempt;
  const auto accept = [&](const CheckpointFolder::Found& found) {
    accept_checkpoint(found, options, run.config.run.output, info, request.force);
  };
  info.progress = opened.checkpoints.load(opened.found.value_or(CheckpointFolder::Found()), store, mesh, rule, accept)
                      .info.progress;
  info.progress.attempt = attempt;
  info.progress = parse_progress(broadcast_text(mesh.world(), progress_text(info.progress)));
  say("resuming after step ", format_grouped(info.progress.step));
}

// What started: parts that several steps of a run share.
struct Started {
  const OptionTable& options;
  const TrainRequest& request;
  const TrainData& data;
  const Mesh& mesh;
  const StopSignals& signals;
  OpenedRun& opened;
  CheckpointInfo info;
};

// Builds the run's parts from its final description and trains.
int train(const RunDescription& run, Started started) {
  const Config& config = run.config;
  const Mesh& mesh = started.mesh;
  Communicator& world = mesh.world();
  CheckpointInfo& info = started.info;
  info.settings = settings_of(config);
  info.environment["micro_batch_size"] = std::to_string(config.train.micro_batch_size);
  ParameterStore store;
  Model model(config.model, store, make_placement(config, mesh), config.train.objective);
  store.allocate(run.device.precision, run.device.device, state_layout(config.train.optimizer),
                 make_partition(config, mesh));
  if (started.opened.resumes) {
    resume(started.opened, store, run, started.options, started.request, mesh, info);
  } else {
    store.initialize(static_cast<std::uint64_t>(config.run.seed));
  }
  on_root(world, [&] {
    started.opened.folder->describe(started.options, info.environment, resolved_values(started.options, config));
  });
  warn_if_disk_is_small(config, store, config.run.output);

  const Tokenizer tokenizer = Tokenizer::load(config.data.shards);
  const MlmEvalSettings eval_settings{config.eval.rows, config.train.micro_batch_size, config.train.mask_rate};
  const auto evaluate = [&] {
    const EvalRecord record = evaluate_mlm(model, store, *started.data.validation, eval_settings, mesh);
    say("  held-out loss ", fixed3(record.loss), ", accuracy ", fixed3(100 * record.accuracy), "% of ",
        format_grouped(record.masked), " masked tokens");
    ForwardPass pass(model, store, mesh.pipeline());
    show_fills(pass, config.model, tokenizer);
    return record;
  };
  Summary summary;
  {
    const std::unique_ptr<BatchSource> batches =
        open_rows(started.data.train, loader_settings(run, mesh), info.progress.consumed_samples, mesh);
    Trainer trainer({run, mesh, model, store, *batches, started.data.train->rows(), started.signals, config.run.output,
                     info, evaluate});
    summary = trainer.run();
  }
  if (world.rank() == 0) {
    if (summary.eval) print_baselines(config, started.data, *summary.eval);
    print_summary(summary, config, config.run.output);
  }
  const bool preempted = summary.reason.rfind("SIG", 0) == 0;
  return static_cast<int>(preempted ? ExitCode::kPreempted : ExitCode::kOk);
}

}  // namespace

int run_training(const Config& given, const OptionTable& options, const TrainRequest& request, const Launch& launch,
                 Communicator& world, const StopSignals& signals, Watchdog* watchdog) {
  world.check_calls(given.parallel.check_calls);
  const int ranks = request.planned_ranks > 0 ? request.planned_ranks : world.size();
  const Layout layout =
      layout_for(ranks, static_cast<int>(given.parallel.tensor), static_cast<int>(given.parallel.pipeline));
  (void)resolve_train_config(given, layout);  // what is wrong with the values needs no data to be said
  const TrainData data = open_data(given.data, request.verify, world);
  if (!request.dry_run) check_started_alike(world, options, data.train->digest());
  RunDescription resolved =
      resolve_run(given, layout, shape_of(*data.train), machine_place(launch), world, /*plans=*/request.dry_run);
  if (given.run.output.empty()) resolved.config.run.output = default_run_path(options, settings_of(resolved.config));
  if (request.dry_run) return dry_run(resolved, launch, data);
  if (request.verify) return verify_run(world, resolved.config);

  use_device(resolved.device);
  const std::unique_ptr<Communicator> device_world = make_device_world(world, resolved.config, resolved.device);
  const Mesh mesh(world, layout, device_world ? *device_world : world);
  CheckpointInfo info;
  info.identity = {{"data digest", data.train->digest()}, {"tokenizer digest", data.train->tokenizer_digest()}};
  info.settings = settings_of(resolved.config);
  info.environment = describe_environment(resolved.device, layout);
  if (resolved.has_micro_batch()) {
    info.environment["micro_batch_size"] = std::to_string(resolved.config.train.micro_batch_size);
  }
  OpenedRun opened = open_run(world, resolved, options, request, info, [&] { print_start(resolved, launch, data); });
  if (watchdog != nullptr) watchdog->call_roll_in(resolved.config.run.output + "/logs");
  print_ranks(mesh, resolved.device, launch);

  const at::NoGradGuard no_grad;  // the backward pass is explicit
  const std::int64_t rows =
      opened.micro_batch != kAutoMicroBatch ? opened.micro_batch : choose_micro_batch(resolved, mesh, signals);
  return train(with_micro_batch(resolved, rows), {options, request, data, mesh, signals, opened, info});
}

}  // namespace cram
