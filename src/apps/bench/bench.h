// The measurements of cram_bench: one file and one table row each. They print a table for a person and end with a
// RESULT line (or, with --json, one JSON object); they assert nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "parallel/communicator.h"
#include "parallel/launch.h"
#include "train/train_config.h"

namespace cram {

/// What a measurement found: figures in the order they are printed.
class BenchResult {
 public:
  void add(const std::string& name, double value) { figures_.emplace_back(name, value); }
  [[nodiscard]] const std::vector<std::pair<std::string, double>>& figures() const { return figures_; }

 private:
  std::vector<std::pair<std::string, double>> figures_;
};

struct BenchContext {
  static constexpr double kMeasure_s = 12, kLongest_s = 86'400;

  const Config& config;  ///< as given
  const Launch& launch;
  Communicator& world;
  std::vector<std::string> paths;  ///< bare arguments that are no settings, as many as Bench::paths
  double measure_s = kMeasure_s;   ///< how long `step` repeats its step
};

struct Bench {
  const char* name;
  const char* help;
  BenchResult (*run)(BenchContext&);
  std::size_t paths = 0;       ///< bare arguments it takes
  bool takes_ranks = false;    ///< measures several ranks; the others are of one process
  bool takes_seconds = false;  ///< --seconds
};

/// Every measurement there is.
[[nodiscard]] const std::vector<Bench>& benches();

[[nodiscard]] BenchResult bench_step(BenchContext& context);
[[nodiscard]] BenchResult bench_gemm(BenchContext& context);
[[nodiscard]] BenchResult bench_kernels(BenchContext& context);
[[nodiscard]] BenchResult bench_optimizer(BenchContext& context);
[[nodiscard]] BenchResult bench_loader(BenchContext& context);
[[nodiscard]] BenchResult bench_pipeline(BenchContext& context);
[[nodiscard]] BenchResult bench_parallel(BenchContext& context);
[[nodiscard]] BenchResult bench_compare(BenchContext& context);

/// The middle one of an odd number of values, the upper middle one otherwise.
[[nodiscard]] double median(std::vector<double> values);
/// Median seconds of `calls` calls, after two whose memory and caches are fresh. On a GPU a sample is several calls
/// with the device idle before and after, so that what is measured is its work and not one launch.
[[nodiscard]] double median_time_s(const std::function<void()>& call, int calls, at::Device device = at::kCPU);

}  // namespace cram
