// Settings of a training run: plain structs and the option rows of the sections run, data, train, eval, checkpoint,
// log. The defaults are the one-day recipe (Geiping & Goldstein, ICML 2023).
#pragma once

#include <cstdint>
#include <string>

#include "base/options.h"
#include "model/model_config.h"
#include "parallel/mesh.h"

namespace cram {

struct RunConfig {
  std::string output;  ///< "" = runs/<hash of the settings>
  std::int64_t seed = 0;
  std::string device = "auto";
  std::int64_t threads = 0;  ///< 0 = all processors this process may use
  bool deterministic = false;
  std::string cuda_graph = "auto";
  Quantity stop_after{0, "steps"};
};

struct DataConfig {
  std::string shards = "shards";
  bool shuffle = false;
  std::string verify = "lazy";
  std::string on_bad_shard = "stop";
};

constexpr std::int64_t kAutoMicroBatch = 0;  ///< train.micro_batch_size=auto, until micro_batch_search.h resolves it

struct TrainConfig {
  Quantity budget{24, "h"};
  std::string clock = "auto";
  std::int64_t batch_size = 8192;
  std::int64_t micro_batch_size = 128;
  std::int64_t batch_quantum = 128;
  double batch_ramp = 0.6;
  std::string objective = "mlm";
  std::string optimizer = "adamw";
  double lr = 1e-3;
  std::string schedule = "triangle2";
  double warmup = 0;
  double peak_fraction = 0.25;
  double weight_decay = 0.01;
  double beta1 = 0.9;
  double beta2 = 0.98;
  double eps = 1e-12;
  double clip = 0.5;
  double mask_rate = 0.25;
  std::string precision = "auto";
  std::string on_nonfinite = "skip";
};

struct ParallelConfig {
  std::int64_t tensor = 1;  ///< data ranks are what tensor and pipeline leave
  std::int64_t pipeline = 1;
  std::int64_t virtual_stages = 1;
  std::string schedule = "auto";
  std::string split;
  bool sequence_parallel = false;
  std::int64_t zero = 0;
  bool overlap = true;
  std::int64_t check_sync = 0;
  bool check_calls = false;
  bool staging = false;
  Quantity timeout{100, "s"};
  Quantity init_timeout{600, "s"};
};

struct EvalConfig {
  Quantity every{30, "m"};
  std::int64_t rows = 2048;
};

struct CheckpointConfig {
  Quantity every{30, "m"};
  std::int64_t keep = 2;
  std::int64_t max_failures = 3;
};

struct LogConfig {
  Quantity every{10, "s"};
};

struct Config {
  RunConfig run;
  ModelConfig model;
  DataConfig data;
  TrainConfig train;
  ParallelConfig parallel;
  EvalConfig eval;
  CheckpointConfig checkpoint;
  LogConfig log;
};

/// Adds every row of `cram_train`.
void add_train_options(OptionTable& table, Config& config);

/// `given` with what follows from its own values: the clock of the budget, and with the ramp off the batch size as the
/// quantum. Checks relations that do not need the data (batch sizes, clock and budget, betas, parallel sizes): throws
/// Error(kUsage) with the nearest legal values.
[[nodiscard]] Config resolve_train_config(const Config& given, const Layout& layout);

/// Masked tokens of every row.
[[nodiscard]] std::int64_t masked_in_row(const Config& config);

}  // namespace cram
