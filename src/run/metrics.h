// Where a run's figures go: metrics.jsonl (the truth), clock.log, TensorBoard and the terminal.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>

#include "run/budget_clock.h"
#include "run/tensorboard.h"

namespace cram {

/// One finished step.
struct StepRecord {
  std::int64_t step = 0;
  double fraction = 0;  ///< t of the step
  double loss = 0;      ///< mean over the batch's masked tokens
  double lr = 0;
  double grad_norm = 0;  ///< of the mean loss, before clipping
  std::int64_t batch_size = 0;
  double step_s = 0;       ///< wall seconds of the step
  double data_wait_s = 0;  ///< of them, waiting for the loader
  double tokens_per_s = 0;
};

struct EvalRecord {
  double loss = 0;      ///< mean cross entropy in nats over the masked held-out tokens
  double accuracy = 0;  ///< fraction of them predicted exactly
  std::int64_t masked = 0;
};

/// Bytes that all ranks together send, counted as CommunicationTrace counts them.
struct Traffic {
  /// Two sums forward and two backward a layer, embedding, head, loss, gradients of shared rows, ids.
  double tensor = 0;
  double pipeline = 0;  ///< activations and their gradients between stages
  double data = 0;      ///< gradients, and weights under ZeRO
  double tied = 0;      ///< gradient of the embedding that two stages hold

  [[nodiscard]] double total() const { return tensor + pipeline + data + tied; }
};

struct TrafficTotals {
  Traffic sent, planned;
};

struct Summary {
  std::string reason;  ///< budget | stop_after | SIGTERM ... | replay ends
  Progress progress;
  double tokens_per_s = 0;
  double lr_end = 0;
  std::optional<EvalRecord> eval;
  std::optional<TrafficTotals> traffic;  ///< where there are several ranks
};

/// An append-only text file whose lines are complete or absent, whatever the disk does.
class LineFile {
 public:
  /// Cuts off a last line that a crash left torn.
  explicit LineFile(const std::string& path);
  ~LineFile();
  LineFile(const LineFile&) = delete;
  LineFile& operator=(const LineFile&) = delete;

  /// Appends the line, or nothing: a part that a full disk took is taken back, the line counts as lost and the first
  /// loss in a row is a warning. Training goes on: a log is not worth a run.
  void append(const std::string& line);

 private:
  std::string path_;
  int fd_;
  std::int64_t lost_ = 0;
};

/// Files of one run folder: metrics.jsonl, clock.log, TensorBoard events.
class MetricsFiles {
 public:
  /// With `writes` false nothing is opened or written: the ranks that only compute.
  MetricsFiles(const std::string& run_folder, bool writes);
  void train(const StepRecord& record, const Progress& progress, double budget_fraction, double left_s);
  void eval(const EvalRecord& record, const Progress& progress);
  /// Something a reader of the log should know: resumed, saved, skipped, signal.
  void event(const std::string& name, const std::string& detail, const Progress& progress);
  void summary(const Summary& summary);

 private:
  void write(const std::string& line);
  std::optional<LineFile> metrics_, clock_log_;
  std::optional<TensorBoardWriter> tensorboard_;
};

/// The progress line: budget used, step, loss (and its moving average), gradient norm, lr, batch, speed, data wait,
/// time left, age of the last checkpoint; flags only where they are not zero.
class ProgressLine {
 public:
  ProgressLine(const Quantity& budget, double start_elapsed_s) : budget_(budget), last_save_s_(start_elapsed_s) {}
  [[nodiscard]] std::string text(const StepRecord& record, const Progress& progress, double fraction, double left_s);
  void saved(double elapsed_s) { last_save_s_ = elapsed_s, ever_saved_ = true; }

 private:
  Quantity budget_;
  double loss_ema_ = 0;
  bool has_ema_ = false;
  double last_save_s_;
  bool ever_saved_ = false;
};

/// "2h14m", "45s", "3d4h"
[[nodiscard]] std::string format_duration(double seconds);
/// "512k", "1.2M", "950"
[[nodiscard]] std::string format_count(double value);
/// "18,200"
[[nodiscard]] std::string format_grouped(std::int64_t value);

}  // namespace cram
