#include "apps/train_session.h"

#include <ATen/core/grad_mode.h>
#include <torch/types.h>

#include <filesystem>
#include <map>
#include <sstream>

#include "apps/micro_batch.h"
#include "apps/train_report.h"
#include "base/log.h"
#include "base/version.h"
#include "data/loader.h"
#include "eval/mlm.h"
#include "parallel/agreement.h"
#include "parallel/mesh.h"
#include "parallel/watchdog.h"
#include "train/micro_batch_search.h"
#include "train/run_plan.h"
#include "train/step_graph.h"
#include "train/trainer.h"

namespace cram {
namespace {

// A value the shards decide: taken from them when left out, refused when it differs.
void settle(std::int64_t& value, std::int64_t from_shards, const char* key, const TrainData& data) {
  if (value == 0) value = from_shards;
  CRAM_CHECK(value == from_shards, ExitCode::kUsage, key, "=", value, ", but ", data.train->folder(), " has ",
             from_shards, " (tokenizer digest ", data.train->tokenizer_digest(), "); leave ", key,
             " out or prepare the data anew");
}

TrainData open_data(Config& config, bool verify_all) {
  CRAM_CHECK(!config.data.shards.empty(), ExitCode::kUsage,
             "data.shards is empty; name a folder made by cram_data pack");
  ShardSetOptions options;
  options.verify_all = verify_all || config.data.verify == "full";
  options.skip_bad_shards = config.data.on_bad_shard == "skip";
  TrainData data;
  data.train = std::make_shared<ShardSet>(ShardSet::open(config.data.shards, "train", options));
  data.validation = std::make_shared<ShardSet>(ShardSet::open(config.data.shards, "validation", options));
  settle(config.model.vocab_size, data.train->vocab_size(), "model.vocab_size", data);
  settle(config.model.seq_length, data.train->seq_length(), "model.seq_length", data);
  return data;
}

// The newest valid checkpoint this command may go on from, nothing for a run that starts. Warns about what changed;
// refuses what must not.
std::optional<CheckpointFolder::Found> checkpoint_to_resume(const OptionTable& options, const RunFolder& folder,
                                                            const CheckpointInfo& now, bool force) {
  if (folder.is_new()) return std::nullopt;
  std::optional<CheckpointFolder::Found> found = CheckpointFolder(folder.checkpoints()).newest_valid();
  if (!found) {
    say("no committed checkpoint in ", folder.path(), ": starting at step 0");
    return std::nullopt;
  }
  std::vector<std::string> changes = changed_settings(found->info.settings, options);
  for (const auto& [what, digest] : now.identity) {
    const auto saved = found->info.identity.find(what);
    if (saved != found->info.identity.end() && saved->second != digest) {
      changes.push_back(concat(what, ": the run has ", saved->second, ", this command ", digest));
    }
  }
  std::string diff;
  for (const std::string& change : changes) diff += "\n  " + change;
  CRAM_CHECK(changes.empty() || force, ExitCode::kUsage, "the run in ", folder.path(),
             " was made with other settings:", diff,
             "\nrun it as it was, choose another run.output, or go on all the same with --force");
  if (!changes.empty()) log_warning("--force: resuming with other settings:", diff);
  std::string differences;
  for (const auto& [what, value] : now.environment) {
    const auto saved = found->info.environment.find(what);
    if (what != "host" && saved != found->info.environment.end() && saved->second != value) {
      differences += concat(" ", what, " ", saved->second, " -> ", value, ";");
    }
  }
  if (!differences.empty()) log_warning("resuming in another environment, last digits may differ:", differences);
  say("resuming from ", found->path);
  return found;
}

// auto on a resume is the size the run was stored with, or the nearest one that this layout can do.
void take_micro_batch_of(const CheckpointInfo& saved, Config& config, const Layout& layout) {
  const auto size = saved.settings.find("train.micro_batch_size");
  if (config.train.micro_batch_size != kAutoMicroBatch || size == saved.settings.end()) return;
  config.train.micro_batch_size =
      nearest_micro_batch(config, layout, parse_integer(size->second, "train.micro_batch_size of the checkpoint"));
  say("train.micro_batch_size=auto: ", config.train.micro_batch_size, ", the run's own is ", size->second);
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

void verify_everything(const RunFolder& folder) {
  say("data: every shard matches its digest");
  const std::vector<std::string> steps = CheckpointFolder(folder.checkpoints()).committed();
  for (const std::string& step : steps) {
    (void)verify_checkpoint(step);
    say("checkpoint ", step, " verifies");
  }
  if (steps.empty()) say("no committed checkpoint in ", folder.path());
}

// Ranks that were not started alike would train apart, or hang: what each was asked for must be what rank 0 was.
void check_started_alike(Communicator& world, const OptionTable& options, const TrainData& data) {
  std::string asked =
      concat("program\t", version(), " ", build_description(), "\ndata digest\t", data.train->digest(), "\n");
  for (const auto& [key, value] : options.values()) asked += concat(key, "\t", value, "\n");
  const std::vector<std::string> all = gather_text(world, asked);
  const auto parsed = [](const std::string& text) {
    std::map<std::string, std::string> values;
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      values[line.substr(0, line.find('\t'))] = line.substr(line.find('\t') + 1);
    }
    return values;
  };
  const std::map<std::string, std::string> first = parsed(all[0]);
  std::string differences;
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    for (const auto& [key, value] : parsed(all[rank])) {
      const auto expected = first.find(key);
      if (expected != first.end() && expected->second == value) continue;
      differences += concat("\n  ", key, ": rank ", rank, " has ", value, ", rank 0 ",
                            expected == first.end() ? "nothing" : expected->second);
    }
  }
  CRAM_CHECK(differences.empty(), ExitCode::kUsage, "the ranks were not started alike:", differences,
             "\nstart all of them with one command, one program and one data folder");
}

// Who is where: one line a rank on rank 0's terminal and log.
void print_ranks(const Mesh& mesh, const DeviceChoice& choice, const Launch& launch) {
  if (mesh.world().size() == 1) return;
  const MeshCoordinates& place = mesh.place();
  const std::vector<std::string> all = gather_text(
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

// Sequence parallelism cuts the rows of a micro-batch; better refused here than in the first step.
void check_rows_can_be_shared(const Config& config, const Layout& layout) {
  const std::int64_t rows = config.train.micro_batch_size * config.model.seq_length;
  CRAM_CHECK(!config.parallel.sequence_parallel || rows % layout.tensor == 0, ExitCode::kUsage,
             "parallel.sequence_parallel: ", rows,
             " tokens of a micro-batch (train.micro_batch_size=", config.train.micro_batch_size, " x ",
             config.model.seq_length, ") cannot be shared out to ", layout.tensor,
             " tensor ranks; choose a micro-batch that can");
}

// This rank's micro-batches. Stages between the first and the last see activations only: they read no data.
std::unique_ptr<BatchSource> open_batches(const Config& config, const Mesh& mesh, const ParameterStore& store,
                                          const TrainData& data, const Progress& progress) {
  if (!mesh.is_first_stage() && !mesh.is_last_stage()) {
    return std::make_unique<RowCounts>(config.train.micro_batch_size, config.model.seq_length);
  }
  LoaderSettings settings;
  settings.dp_rank = mesh.place().dp_rank;
  settings.dp_size = mesh.layout().data;
  settings.micro_batch = config.train.micro_batch_size;
  settings.seed = static_cast<std::uint64_t>(config.run.seed);
  settings.mask_rate = config.train.mask_rate;
  settings.shuffle = config.data.shuffle;
  settings.pin_memory = store.device().is_cuda();
  return std::make_unique<Loader>(data.train, settings, progress.consumed_samples);
}

struct OpenedRun {
  std::unique_ptr<RunFolder> folder;  // rank 0's
  std::string resume_from;            // a checkpoint; "" = step 0
};

// The run folder is rank 0's business; the others learn where to resume from. Fills in info.progress and, of a run that
// goes on, an automatic micro-batch size.
OpenedRun open_run(Communicator& world, Config& config, const OptionTable& options, const TrainRequest& request,
                   CheckpointInfo& info, const Layout& layout, const std::function<void()>& introduce) {
  OpenedRun run;
  on_root(world, [&] {
    introduce();
    run.folder = std::make_unique<RunFolder>(config.run.output);
    if (request.fresh) run.folder->set_aside();
    run.folder->lock();
    const std::int64_t attempt = next_attempt(run.folder->path());
    if (const auto found = checkpoint_to_resume(options, *run.folder, info, request.force)) {
      run.resume_from = found->path;
      info.progress = found->info.progress;
      // Before the first step no number depends on it: a search that a signal ended is made again.
      if (found->info.progress.step > 0) take_micro_batch_of(found->info, config, layout);
    }
    info.progress.attempt = attempt;
    run.folder->open(options, info.environment);
    clear_roll_call(config.run.output + "/logs", world.size());
  });
  run.resume_from = broadcast_text(world, run.resume_from);
  info.progress = parse_progress(broadcast_text(world, progress_text(info.progress)));
  config.train.micro_batch_size = agree_on_largest(world, config.train.micro_batch_size);
  if (world.rank() > 0) open_log_file(rank_log_path(config.run.output, world.rank()));
  return run;
}

int dry_run(Config& config, const OptionTable& options, const DeviceChoice& choice, const Launch& launch,
            const TrainData& data, const Layout& layout) {
  if (config.train.micro_batch_size == kAutoMicroBatch) {
    const std::optional<std::int64_t> measured = remembered_micro_batch(config, layout, choice);
    config.train.micro_batch_size =
        measured ? *measured : nearest_micro_batch(config, layout, TrainConfig().micro_batch_size);
    say("train.micro_batch_size=auto",
        measured ? ", measured before: " : " is measured when the run starts; planned with ",
        config.train.micro_batch_size);
  }
  const RunPlanned plan = plan_run(config, layout, config.train.batch_size, masked_in_row(config));
  if (launch.rank > 0) return 0;
  print_start(config, options, choice, launch, data);
  say(describe_plan(plan, config, layout));
  say("dry run: nothing was allocated or written");
  return 0;
}

int verify_run(Communicator& world, const Config& config) {
  on_root(world, [&] { verify_everything(RunFolder(config.run.output)); });
  return 0;
}

}  // namespace

int run_training(Config& config, OptionTable& options, const TrainRequest& request, const Launch& launch,
                 Communicator& world, const StopSignals& signals, Watchdog* watchdog) {
  world.check_calls(config.parallel.check_calls);
  const int ranks = request.planned_ranks > 0 ? request.planned_ranks : world.size();
  const Layout layout =
      layout_for(ranks, static_cast<int>(config.parallel.tensor), static_cast<int>(config.parallel.pipeline));
  resolve_train_config(config, layout);
  const TrainData data = open_data(config, request.verify);
  check_model_config(config.model);
  CRAM_CHECK(masked_in_row(config) > 0, ExitCode::kUsage, "train.mask_rate=", config.train.mask_rate,
             " masks no token of a row of ", config.model.seq_length, "; the rate must be above ",
             0.5 / static_cast<double>(config.model.seq_length));
  check_rows_can_be_shared(config, layout);
  if (!request.dry_run) check_started_alike(world, options, data);
  const bool alone_under_mpirun = launch.launcher != "none" && launch.local_size == 1;
  const int processors = std::max(1, available_processors(alone_under_mpirun) / launch.local_size);
  const DeviceChoice choice =
      choose_device(config, processors, launch.local_rank, launch.local_size, /*plans=*/request.dry_run);
  (void)choose_cuda_graph(config, layout, choice.device);  // refused before anything is written
  if (config.run.output.empty()) config.run.output = default_run_path(options);
  if (request.dry_run) return dry_run(config, options, choice, launch, data, layout);
  if (request.verify) return verify_run(world, config);

  const std::unique_ptr<Communicator> device_world = make_device_world(world, config, choice);
  const Mesh mesh(world, layout, device_world ? *device_world : world);
  CheckpointInfo info;
  info.identity = {{"data digest", data.train->digest()}, {"tokenizer digest", data.train->tokenizer_digest()}};
  info.environment = describe_environment(choice, layout);
  if (config.train.micro_batch_size != kAutoMicroBatch) {
    info.environment["micro_batch_size"] = std::to_string(config.train.micro_batch_size);
  }

  const OpenedRun run = open_run(world, config, options, request, info, layout,
                                 [&] { print_start(config, options, choice, launch, data); });
  if (watchdog != nullptr) watchdog->call_roll_in(config.run.output + "/logs");
  print_ranks(mesh, choice, launch);

  const at::NoGradGuard no_grad;  // the backward pass is explicit
  const bool searches = config.train.micro_batch_size == kAutoMicroBatch;
  if (searches) config.train.micro_batch_size = choose_micro_batch(config, mesh, choice, signals);
  info.environment["micro_batch_size"] = std::to_string(config.train.micro_batch_size);
  if (searches) on_root(world, [&] { run.folder->describe(options, info.environment); });
  info.settings = options.values();
  ParameterStore store;
  Model model(config.model, store, make_placement(config, mesh), config.train.objective);
  store.allocate(choice.precision, choice.device, state_layout(config.train.optimizer), make_partition(config, mesh));
  if (run.resume_from.empty()) {
    store.initialize(static_cast<std::uint64_t>(config.run.seed));
  } else {
    load_checkpoint(run.resume_from, store, parameter_names(config.model, config.train.objective));
    say("resuming after step ", format_grouped(info.progress.step));
  }
  warn_if_disk_is_small(config, store, config.run.output);

  const Tokenizer tokenizer = Tokenizer::load(config.data.shards);
  const MlmEvalSettings eval_settings{config.eval.rows, config.train.micro_batch_size, config.train.mask_rate};
  const auto evaluate = [&] {
    const EvalRecord record = evaluate_mlm(model, store, *data.validation, eval_settings, mesh);
    say("  held-out loss ", fixed3(record.loss), ", accuracy ", fixed3(100 * record.accuracy), "% of ",
        format_grouped(record.masked), " masked tokens");
    ForwardPass pass(model, store, mesh.pipeline());
    show_fills(pass, config.model, tokenizer);
    return record;
  };
  Summary summary;
  {
    const std::unique_ptr<BatchSource> batches = open_batches(config, mesh, store, data, info.progress);
    Trainer trainer(
        {config, mesh, model, store, *batches, data.train->rows(), signals, config.run.output, info, evaluate});
    summary = trainer.run();
  }
  if (world.rank() == 0) {
    if (summary.eval) print_baselines(config, data, *summary.eval);
    print_summary(summary, config, config.run.output);
  }
  const bool preempted = summary.reason.rfind("SIG", 0) == 0;
  return static_cast<int>(preempted ? ExitCode::kPreempted : ExitCode::kOk);
}

}  // namespace cram
