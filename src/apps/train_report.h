// What cram_train says to the person who runs it: the start, evaluations, the end.
#pragma once

#include <memory>
#include <string>

#include "data/shard_set.h"
#include "data/tokenizer.h"
#include "parallel/launch.h"
#include "run/metrics.h"
#include "train/forward_pass.h"
#include "train/run_description.h"

namespace cram {

struct TrainData {
  std::shared_ptr<ShardSet> train;
  std::shared_ptr<ShardSet> validation;
};

/// Versions, every setting, the model's and the data's size.
void print_start(const RunDescription& run, const Launch& launch, const TrainData& data);

/// A few sentences with their gaps filled; collective over the model's groups.
void show_fills(ForwardPass& pass, const ModelConfig& model, const Tokenizer& tokenizer);

/// The held-out loss beside that of guessing uniformly and by frequency.
void print_baselines(const Config& config, const TrainData& data, const EvalRecord& eval);

void print_summary(const Summary& summary, const Config& config, const std::string& run_folder);

/// "5.784"
[[nodiscard]] std::string fixed3(double value);

}  // namespace cram
