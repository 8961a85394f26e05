#include "apps/train_session.h"

#include <ATen/core/grad_mode.h>
#include <torch/types.h>

#include <cmath>
#include <cstdio>
#include <filesystem>

#include "base/log.h"
#include "base/version.h"
#include "data/tokenizer.h"
#include "eval/fill_mask.h"
#include "eval/mlm.h"
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
                 const Data& data) {
  say(choice.reason);
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
  say("dry run: 1 rank (data 1 x tensor 1 x pipeline 1), ", registered.size(), " tensors, ", numel, " elements, ",
      format_count(static_cast<double>(bytes)),
      "B for weights, gradients and moments; nothing was allocated or written");
}

void show_fills(Encoder& encoder, at::Device device, const Tokenizer& tokenizer) {
  for (const char* sentence : kSentences) {
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

// Loads the newest valid checkpoint, or initial weights when there is none.
CheckpointInfo resume_or_initialize(const Config& config, const OptionTable& options, RunFolder& folder,
                                    const CheckpointInfo& now, bool force, ParameterStore& store) {
  const std::int64_t attempt = next_attempt(folder.path());
  std::optional<CheckpointFolder::Found> found;
  if (!folder.is_new()) found = CheckpointFolder(folder.checkpoints()).newest_valid();
  if (!found) {
    if (!folder.is_new()) say("no committed checkpoint in ", folder.path(), ": starting at step 0");
    store.initialize(static_cast<std::uint64_t>(config.run.seed));
    CheckpointInfo info = now;
    info.progress.attempt = attempt;
    return info;
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
  load_checkpoint(found->path, store);
  CheckpointInfo info = now;
  info.progress = found->info.progress;
  info.progress.attempt = attempt;
  say("resuming after step ", format_grouped(info.progress.step), " from ", found->path);
  return info;
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

int verify_everything(const RunFolder& folder) {
  say("data: every shard matches its digest");
  const std::vector<std::string> steps = CheckpointFolder(folder.checkpoints()).committed();
  for (const std::string& step : steps) {
    (void)verify_checkpoint(step);
    say("checkpoint ", step, " verifies");
  }
  if (steps.empty()) say("no committed checkpoint in ", folder.path());
  return 0;
}

}  // namespace

int run_training(Config& config, OptionTable& options, const TrainRequest& request, const Launch& launch) {
  resolve_train_config(config, /*data_parallel_size=*/1);
  const Data data = open_data(config, request.verify);
  check_model_config(config.model);
  const bool alone_under_mpirun = launch.launcher != "none" && launch.local_size == 1;
  const DeviceChoice choice = choose_device(config, available_processors(alone_under_mpirun));
  if (config.run.output.empty()) config.run.output = default_run_path(options);
  RunFolder folder(config.run.output);
  if (request.verify) return verify_everything(folder);

  ParameterStore store;
  Encoder encoder(config.model, store);
  print_start(config, options, choice, launch, data);
  if (request.dry_run) {
    print_dry_run(config, store);
    return 0;
  }

  if (request.fresh) folder.set_aside();
  folder.lock();
  const at::NoGradGuard no_grad;  // the backward pass is explicit
  store.allocate(choice.precision, choice.device);
  CheckpointInfo now;
  now.settings = options.values();
  now.identity = {{"data digest", data.train->digest()}, {"tokenizer digest", data.train->tokenizer_digest()}};
  now.environment = describe_environment(choice);
  const CheckpointInfo info = resume_or_initialize(config, options, folder, now, request.force, store);
  folder.open(options, now.environment);
  warn_if_disk_is_small(config, store, folder.path());

  const Tokenizer tokenizer = Tokenizer::load(config.data.shards);
  const MlmEvalSettings eval_settings{config.eval.rows, config.train.micro_batch_size, config.train.mask_rate};
  const auto evaluate = [&] {
    const EvalRecord record = evaluate_mlm(encoder, choice.device, *data.validation, eval_settings);
    say("  held-out loss ", fixed3(record.loss), ", accuracy ", fixed3(100 * record.accuracy), "% of ",
        format_grouped(record.masked), " masked tokens");
    show_fills(encoder, choice.device, tokenizer);
    return record;
  };
  Summary summary;
  {
    Trainer trainer({config, encoder, store, data.train, folder.path(), info, evaluate});
    summary = trainer.run();
  }
  if (summary.eval) print_baselines(config, data, *summary.eval);
  print_summary(summary, config, folder.path());
  const bool preempted = summary.reason.rfind("SIG", 0) == 0;
  return static_cast<int>(preempted ? ExitCode::kPreempted : ExitCode::kOk);
}

}  // namespace cram
