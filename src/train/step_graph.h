// A micro-step as one recorded graph: run a few times as it is, recorded once, replayed from then on. A GPU's launches
// then cost one call instead of hundreds.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/batch.h"
#include "parallel/mesh.h"
#include "train/train_config.h"

namespace cram {

/// Device work that was recorded.
class RecordedStep {
 public:
  virtual ~RecordedStep() = default;
  /// Runs it again, on what is at the recorded addresses now.
  virtual void replay() = 0;
};

/// How a device records. Tests have one that keeps the function.
class GraphRecorder {
 public:
  virtual ~GraphRecorder() = default;
  /// Runs `work` for real, where `record` will see it: lazily made tables, workspaces and plans are there afterwards.
  virtual void warm_up(const std::function<void()>& work) = 0;
  /// Records the device work of `work` without running it. Throws when something in it cannot be recorded; nothing has
  /// run then either.
  [[nodiscard]] virtual std::unique_ptr<RecordedStep> record(const std::function<void()>& work) = 0;
};

/// The micro-steps of a run, a record for each shape of a micro-batch.
class StepGraphs {
 public:
  static constexpr int kWarmUps = 2;
  static constexpr std::size_t kMostShapes = 4;  ///< others run as they are

  /// `required`: a step that cannot be recorded is an error; otherwise a warning, and steps run as they are.
  StepGraphs(std::unique_ptr<GraphRecorder> recorder, bool required)
      : recorder_(std::move(recorder)), required_(required) {}

  /// `work(batch)`, on fixed tensors that the batch is copied to. `work` must do the same at every call for one shape,
  /// and must not refer to what this call's caller owns: it is kept. It reads nothing else that a step replaces.
  void run(const Batch& batch, const std::function<void(const Batch&)>& work);

 private:
  struct Shape {
    Batch fixed;
    int warm_ups = 0;
    std::unique_ptr<RecordedStep> recorded;
  };
  [[nodiscard]] Shape* shape_of(const Batch& batch);

  std::unique_ptr<GraphRecorder> recorder_;
  bool required_;
  bool gave_up_ = false, said_too_many_ = false;
  std::vector<Shape> shapes_;
};

struct GraphChoice {
  bool use = false;
  bool required = false;  ///< asked for: what cannot be recorded is an error
  std::string reason;
};

/// Whether run.cuda_graph and the rest of the configuration allow records on this device, and why (not). Throws
/// Error(kUsage) for run.cuda_graph=on where they are not legal.
[[nodiscard]] GraphChoice choose_cuda_graph(const Config& config, const Layout& layout, at::Device device);

/// The recorder of a GPU. Throws Error(kUsage) in a build without CUDA.
[[nodiscard]] std::unique_ptr<GraphRecorder> make_cuda_graph_recorder(at::Device device);

/// What was chosen, logged on a GPU; nullptr where micro-steps run as they are.
[[nodiscard]] std::unique_ptr<StepGraphs> make_step_graphs(const GraphChoice& choice, at::Device device);

}  // namespace cram
