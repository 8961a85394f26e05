#include "apps/train_report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "base/log.h"
#include "base/version.h"
#include "eval/fill_mask.h"
#include "eval/mlm.h"
#include "parallel/mpi_environment.h"
#include "train/schedules.h"

namespace cram {
namespace {

// Shown at every evaluation; three so that one odd word does not mislead.
constexpr const char* kSentences[] = {"the president of the united [MASK] .", "she was very [MASK] to see him .",
                                      "the people of the [MASK] want peace ."};

// Reading the whole train split for a baseline is fine for a small corpus and a waste for a large one.
constexpr std::int64_t kLargestBaselineTokens = 1LL << 28;

}  // namespace

void print_start(const RunDescription& run, const Launch& launch, const TrainData& data) {
  say(run.device.text());
  say("cram ", version(), " (", build_description(), "; ", mpi_version(), "; started by ", launch.launcher, ")");
  Config config = run.config;  // the table points to what it could change
  OptionTable options;
  add_train_options(options, config);
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
  say("model: ", format_grouped(parameter_count(m, config.train.objective)), " parameters, ",
      format_count(train_flops_per_token(m, masked_in_row(config), config.train.objective)), "FLOP a trained token");
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

void show_fills(ForwardPass& pass, const ModelConfig& model, const Tokenizer& tokenizer) {
  for (const char* sentence : kSentences) {
    // Short rows or a small vocabulary may have no room for it.
    if (sentence_tokens(tokenizer, sentence) > model.seq_length) continue;
    std::string line = concat("  ", sentence, "  ->");
    const std::vector<FilledGap> gaps = fill_mask(pass, model, tokenizer, sentence, 3);
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

void print_baselines(const Config& config, const TrainData& data, const EvalRecord& eval) {
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

}  // namespace cram
