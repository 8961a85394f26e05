#include "apps/train_session.h"

#include <ATen/core/grad_mode.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>

#include "base/log.h"
#include "base/version.h"
#include "data/tokenizer.h"
#include "eval/fill_mask.h"
#include "eval/mlm.h"
#include "parallel/agreement.h"
#include "parallel/mesh.h"
#include "parallel/mpi_environment.h"
#include "train/device.h"
#include "train/schedules.h"
#include "train/trainer.h"

namespace cram {
namespace {

// Shown at every evaluation; three so that one odd word does not mislead.
constexpr const char* kSentences[] = {"the president of the united [MASK] .", "she was very [MASK] to see him .",
                                      "the people of the [MASK] want peace ."};

// Reading the whole train split for a baseline is fine for a small corpus and a waste for a large one.
constexpr std::int64_t kLargestBaselineTokens = 1LL << 28;

struct Data {
  std::shared_ptr<ShardSet> train;
  std::shared_ptr<ShardSet> validation;
};

// A value the shards decide: taken from them when left out, refused when it differs.
void settle(std::int64_t& value, std::int64_t from_shards, const char* key, const Data& data) {
  if (value == 0) value = from_shards;
  CRAM_CHECK(value == from_shards, ExitCode::kUsage, key, "=", value, ", but ", data.train->folder(), " has ",
             from_shards, " (tokenizer digest ", data.train->tokenizer_digest(), "); leave ", key,
             " out or prepare the data anew");
}

Data open_data(Config& config, bool verify_all) {
  CRAM_CHECK(!config.data.shards.empty(), ExitCode::kUsage,
             "data.shards is empty; name a folder made by cram_data pack");
  ShardSetOptions options;
  options.verify_all = verify_all || config.data.verify == "full";
  options.skip_bad_shards = config.data.on_bad_shard == "skip";
  Data data;
  data.train = std::make_shared<ShardSet>(ShardSet::open(config.data.shards, "train", options));
  data.validation = std::make_shared<ShardSet>(ShardSet::open(config.data.shards, "validation", options));
  settle(config.model.vocab_size, data.train->vocab_size(), "model.vocab_size", data);
  settle(config.model.seq_length, data.train->seq_length(), "model.seq_length", data);
  return data;
}

std::int64_t masked_in_row(const Config& config) {
  return masked_per_row({.seed = 0,
                         .vocab_size = config.model.vocab_size,
                         .seq_length = config.model.seq_length,
                         .mask_rate = config.train.mask_rate});
}

void print_start(const Config& config, const OptionTable& options, const DeviceChoice& choice, const Launch& launch,
                 const Mesh& mesh, const Data& data) {
  say(choice.reason);
  if (mesh.world().size() > 1) say("ranks: ", mesh.world().size(), ", layout ", mesh.layout().text());
  say("cram ", version(), " (", build_description(), "; ", mpi_version(), "; started by ", launch.launcher, ")");
  std::string section, line;
  for (const Option& row : options.rows()) {
    const std::size_t dot = row.key().find('.');
    if (row.key().substr(0, dot) != section) {
      if (!line.empty()) say(line);
      section = row.key().substr(0, dot);
      line = "[" + section + "]";
    }
    line += " " + row.key().substr(dot + 1) + "=" + row.toml_text();
  }
  say(line);
  const ModelConfig& m = config.model;
  say("model: ", format_grouped(parameter_count(m)), " parameters, ",
      format_count(train_flops_per_token(m, masked_in_row(config))), "FLOP a trained token");
  const std::int64_t rows = data.train->rows();
  say("data: ", config.data.shards, ": ", format_grouped(rows), " rows x ", m.seq_length, " tokens (",
      format_count(static_cast<double>(rows * m.seq_length)), "), ", format_grouped(data.validation->rows()),
      " held-out rows, vocabulary ", format_grouped(m.vocab_size), ", order ", data.train->order());
  const Quantity& budget = config.train.budget;
  double tokens = budget.unit == "tokens" ? budget.value : 0;
  if (budget.unit == "steps") {
    // With a ramp the batch is a function of step/steps, so the sum is known beforehand.
    for (std::int64_t step = 0; step < static_cast<std::int64_t>(budget.value) && step < 1'000'000; ++step) {
      tokens += static_cast<double>(
          m.seq_length * ramped_batch_size(config.train.batch_size, config.train.batch_quantum, config.train.batch_ramp,
                                           static_cast<double>(step) / budget.value));
    }
  }
  const double epochs = tokens / static_cast<double>(rows * m.seq_length);
  if (epochs > 1) {
    say("the corpus is shorter than the budget: its rows are read ", format_double(std::round(epochs * 10) / 10),
        " times, with new masks each time");
  }
}

void print_dry_run(const Config& config, const ParameterStore& registered) {
  std::uintmax_t numel = 0;
  for (ParamId id = 0; id < registered.size(); ++id) numel += static_cast<std::uintmax_t>(registered.local_numel(id));
  const bool bf16 = config.train.precision == "bf16";
  const std::uintmax_t bytes = numel * (config.train.precision == "fp64" ? 32 : bf16 ? 18 : 16);
  say("dry run: ", registered.size(), " tensors, ", numel, " elements, ", format_count(static_cast<double>(bytes)),
      "B a rank for weights, gradients and moments; nothing was allocated or written");
}

void show_fills(Encoder& encoder, at::Device device, const Tokenizer& tokenizer) {
  for (const char* sentence : kSentences) {
    // Short rows or a small vocabulary may have no room for it.
    if (sentence_tokens(tokenizer, sentence) > encoder.config().seq_length) continue;
    std::string line = concat("  ", sentence, "  ->");
    const std::vector<FilledGap> gaps = fill_mask(encoder, device, tokenizer, sentence, 3);
    for (const FilledGap::Candidate& c : gaps[0].candidates) {
      char percent[16];
      std::snprintf(percent, sizeof percent, "%.1f%%", 100 * c.probability);
      line += concat(" ", c.piece, " ", percent);
    }
    say(line);
  }
}

std::string fixed3(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3f", value);
  return text;
}

void print_baselines(const Config& config, const Data& data, const EvalRecord& eval) {
  std::string line = concat("held-out loss ", fixed3(eval.loss), " nats a masked token; uniform guessing ",
                            fixed3(std::log(static_cast<double>(config.model.vocab_size))));
  if (data.train->rows() * config.model.seq_length <= kLargestBaselineTokens) {
    line += concat(", unigram frequencies ", fixed3(unigram_loss(*data.train, *data.validation)));
  }
  say(line);
}

void print_summary(const Summary& s, const Config& config, const std::string& run_folder) {
  say("\nstopped: ", s.reason, " | steps ", format_grouped(s.progress.step), " | tokens ",
      format_grouped(s.progress.tokens), " | ", format_count(s.tokens_per_s), " tokens/s | training clock ",
      format_duration(s.progress.elapsed_s), " of ", config.train.budget.text(),
      " (data wait, steps, logging and saves on the way; not start-up, evaluation and the last save: ",
      format_duration(s.progress.excluded_s), ") | lr at the end of the schedule ", format_double(s.lr_end));
  say("run folder: ", run_folder, " (config.toml, metrics.jsonl, checkpoints/, tb/)");
}

// The newest valid checkpoint this command may go on from, "" for a run that starts. Warns about what changed; refuses
// what must not.
std::string checkpoint_to_resume(const OptionTable& options, const RunFolder& folder, const CheckpointInfo& now,
                                 bool force) {
  if (folder.is_new()) return "";
  const std::optional<CheckpointFolder::Found> found = CheckpointFolder(folder.checkpoints()).newest_valid();
  if (!found) {
    say("no committed checkpoint in ", folder.path(), ": starting at step 0");
    return "";
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
  return found->path;
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

}  // namespace

int run_training(Config& config, OptionTable& options, const TrainRequest& request, const Launch& launch,
                 Communicator& world, const StopSignals& signals) {
  const Layout layout =
      layout_for(world.size(), static_cast<int>(config.parallel.tensor), static_cast<int>(config.parallel.pipeline));
  resolve_train_config(config, layout);
  const Mesh mesh(world, layout);
  const Data data = open_data(config, request.verify);
  check_model_config(config.model);
  CRAM_CHECK(masked_in_row(config) > 0, ExitCode::kUsage, "train.mask_rate=", config.train.mask_rate,
             " masks no token of a row of ", config.model.seq_length, "; the rate must be above ",
             0.5 / static_cast<double>(config.model.seq_length));
  const bool alone_under_mpirun = launch.launcher != "none" && launch.local_size == 1;
  const int processors = std::max(1, available_processors(alone_under_mpirun) / launch.local_size);
  const DeviceChoice choice = choose_device(config, processors);
  if (config.run.output.empty()) config.run.output = default_run_path(options);

  ParameterStore store;
  Encoder encoder(config.model, store, make_placement(config, mesh));
  CheckpointInfo info;
  info.settings = options.values();
  info.identity = {{"data digest", data.train->digest()}, {"tokenizer digest", data.train->tokenizer_digest()}};
  info.environment = describe_environment(choice, mesh.layout());
  info.environment["micro_batch_size"] = std::to_string(config.train.micro_batch_size);

  // The run folder is rank 0's business; the others learn where to resume from.
  std::optional<RunFolder> folder;
  std::string resume_from;
  bool stop_here = false;
  on_root(world, [&] {
    folder.emplace(config.run.output);
    if (request.verify) {
      verify_everything(*folder);
      stop_here = true;
      return;
    }
    print_start(config, options, choice, launch, mesh, data);
    if (request.dry_run) {
      print_dry_run(config, store);
      stop_here = true;
      return;
    }
    if (request.fresh) folder->set_aside();
    folder->lock();
    info.progress.attempt = next_attempt(folder->path());
    resume_from = checkpoint_to_resume(options, *folder, info, request.force);
    folder->open(options, info.environment);
  });
  if (agree_on_largest(world, stop_here ? 1 : 0) != 0) return 0;
  resume_from = broadcast_text(world, resume_from);
  info.progress.attempt = agree_on_largest(world, info.progress.attempt);
  if (world.rank() > 0) open_log_file(rank_log_path(config.run.output, world.rank()));

  const at::NoGradGuard no_grad;  // the backward pass is explicit
  Partition partition;
  if (config.parallel.zero > 0) partition = {mesh.place().dp_rank, mesh.layout().data};
  store.allocate(choice.precision, choice.device, /*with_optimizer=*/true, partition);
  if (resume_from.empty()) {
    store.initialize(static_cast<std::uint64_t>(config.run.seed));
  } else {
    const std::int64_t attempt = info.progress.attempt;
    info.progress = verify_checkpoint(resume_from).progress;
    info.progress.attempt = attempt;
    load_checkpoint(resume_from, store, parameter_names(config.model));
    say("resuming after step ", format_grouped(info.progress.step));
  }
  warn_if_disk_is_small(config, store, config.run.output);

  const Tokenizer tokenizer = Tokenizer::load(config.data.shards);
  const MlmEvalSettings eval_settings{config.eval.rows, config.train.micro_batch_size, config.train.mask_rate};
  const auto evaluate = [&] {
    const EvalRecord record = evaluate_mlm(encoder, choice.device, *data.validation, eval_settings, mesh);
    say("  held-out loss ", fixed3(record.loss), ", accuracy ", fixed3(100 * record.accuracy), "% of ",
        format_grouped(record.masked), " masked tokens");
    show_fills(encoder, choice.device, tokenizer);  // every rank: logits are gathered over the tensor ranks
    return record;
  };
  Summary summary;
  {
    Trainer trainer({config, mesh, encoder, store, data.train, signals, config.run.output, info, evaluate});
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
