// The micro-steps of one batch: fetches micro-batches, runs them through this rank's part of the model by a pipeline
// plan, and tells the gradient exchange what is complete while the last ones are still running.
#pragma once

#include <deque>
#include <functional>
#include <map>

#include "data/loader.h"
#include "model/encoder.h"
#include "parallel/grad_sync.h"
#include "parallel/mesh.h"
#include "parallel/pipeline.h"
#include "train/batch_prefetch.h"
#include "train/step_graph.h"
#include "train/train_config.h"

namespace cram {

class MicroSteps final : public PipelineStage {
 public:
  /// All must outlive it. `next_batch` returns this rank's next micro-batch, on the host. With `graphs` micro-steps are
  /// recorded and replayed, except those that exchange something; nullptr: they run as they are.
  MicroSteps(Encoder& encoder, ParameterStore& store, GradSync& sync, const Mesh& mesh, const Config& config,
             std::function<Batch()> next_batch, std::unique_ptr<StepGraphs> graphs = nullptr);

  /// Runs the micro-batches of a batch, adding their gradients, which are exchanged as they become complete (not
  /// without `exchange`). `step` (from 1) and the first global sample are for dropout. `stop` is asked wherever nothing
  /// is in flight on any stage: before every micro-batch where there is one stage, before the batch otherwise. False
  /// when it said so; the gradients so far are then the caller's to clear.
  [[nodiscard]] bool run_batch(std::int64_t step, std::int64_t first_sample, std::int64_t micro_batches,
                               const std::function<bool()>& stop = {}, bool exchange = true);

  struct Totals {
    double loss_sum = 0;     ///< of this rank's micro-batches; 0 where the last stage is another rank
    double masked = 0;       ///< masked tokens in them
    double data_wait_s = 0;  ///< waited for the loader
  };
  /// Of the batch so far. Waits for the device.
  [[nodiscard]] Totals totals() const;

  // PipelineStage
  [[nodiscard]] at::Tensor forward(int block, int micro_batch, const at::Tensor& input) override;
  [[nodiscard]] at::Tensor backward(int block, int micro_batch, const at::Tensor& d_output) override;
  [[nodiscard]] at::Tensor make_activation() override;

 private:
  void run(std::int64_t count, bool last);
  void run_plan();
  /// Waits for the loader, for the profile and the totals.
  template <class Call>
  void wait_for_data(const Call& call);
  [[nodiscard]] const MicroBatch& micro_batch(int number);
  [[nodiscard]] const StagePlan& plan_for(int micro_batches);
  [[nodiscard]] PlanShape shape_for(int micro_batches) const;

  Encoder& encoder_;
  ParameterStore& store_;
  GradSync& sync_;
  const Mesh& mesh_;
  const Config& config_;
  BatchPrefetch batches_;
  std::unique_ptr<StepGraphs> graphs_;
  std::map<int, StagePlan> plans_;  // by number of micro-batches: a ramp has several
  // Of the batch.
  std::int64_t step_ = 0, first_sample_ = 0, done_ = 0;
  at::Tensor loss_sum_;
  double masked_ = 0, data_wait_s_ = 0;
  // Of the flush.
  int count_ = 0;
  bool last_ = false;
  int fetched_ = 0;
  std::map<int, MicroBatch> in_flight_;
  std::map<std::pair<int, int>, Encoder::BlockSaved> saved_;  // block, micro-batch
};

/// The gradient exchange over a store's buffers.
[[nodiscard]] GradSync make_grad_sync(const ParameterStore& store, const Mesh& mesh, bool overlap);

/// Where a rank's part of the model is, from the configuration and its two groups.
[[nodiscard]] Placement place_in(const Config& config, Communicator& tensor, Communicator& pipeline);
[[nodiscard]] inline Placement make_placement(const Config& config, const Mesh& mesh) {
  return place_in(config, mesh.tensor(), mesh.pipeline());
}

/// What this data rank owns of the optimizer's state: all, or its part with parallel.zero.
[[nodiscard]] Partition make_partition(const Config& config, const Mesh& mesh);

/// The order of computations that the configuration asks for.
[[nodiscard]] PlanKind plan_kind(const ParallelConfig& parallel);

}  // namespace cram
