// The micro-steps of one batch: fetches micro-batches, runs them through this rank's part of the model by a pipeline
// plan, and tells the gradient exchange what is complete while the last ones are still running.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>

#include "data/batch_source.h"
#include "model/model.h"
#include "parallel/agreement.h"
#include "parallel/grad_sync.h"
#include "parallel/mesh.h"
#include "parallel/pipeline.h"
#include "train/batch_prefetch.h"
#include "train/step_graph.h"
#include "train/train_config.h"

namespace cram {

/// Of micro-steps: what they look like and how a pipeline runs them.
struct MicroStepSettings {
  std::int64_t micro_batch = 1;  ///< rows
  double dropout = 0;
  std::uint64_t seed = 0;  ///< of dropout
  PlanKind plan = PlanKind::kOneForwardOneBackward;
};
[[nodiscard]] MicroStepSettings micro_step_settings(const Config& config);

class MicroSteps final : public PipelineStage {
 public:
  /// All must outlive it. `source` gives this rank's micro-batches. With `graphs` micro-steps are recorded and
  /// replayed, except those that exchange something; nullptr: they run as they are.
  MicroSteps(Model& model, ParameterStore& store, GradSync& sync, const Mesh& mesh, const MicroStepSettings& settings,
             BatchSource& source, std::unique_ptr<StepGraphs> graphs = nullptr);

  struct Request {
    std::int64_t step = 1;          ///< from 1, for dropout
    std::int64_t first_sample = 0;  ///< global, for dropout
    std::int64_t micro_batches = 1;
    bool exchange = true;  ///< gradients are exchanged as they become complete
    /// Whether to stop (not 0): collective over the world, asked before every `ask_every`-th micro-batch.
    std::function<PendingLargest()> ask = {};
    std::int64_t ask_every = 1;
  };
  /// Runs the micro-batches of a batch, adding their gradients. Not 0, the answer to `ask`, when it said to stop: what
  /// was in flight is brought to its end without computing, and the gradients are the caller's to clear.
  [[nodiscard]] std::int64_t run_batch(const Request& request);

  struct Totals {
    double loss_sum = 0;     ///< of this rank's micro-batches; 0 where the last stage is another rank
    double count = 0;        ///< terms of the loss in them
    double data_wait_s = 0;  ///< waited for the source
  };
  /// Of the batch so far. Waits for the device.
  [[nodiscard]] Totals totals() const;

  // PipelineStage
  [[nodiscard]] at::Tensor forward(int block, int micro_batch, const at::Tensor& input) override;
  [[nodiscard]] at::Tensor backward(int block, int micro_batch, const at::Tensor& d_output) override;
  [[nodiscard]] at::Tensor make_activation(int micro_batch) override;

 private:
  void run(std::int64_t count, bool last);
  void run_plan();
  /// Asks whether to stop, before the first block of a micro-batch (forward, or backward where those come last), and
  /// hears what was answered some micro-batches ago.
  void ask(int block, int number, bool is_forward);
  /// Waits for the source, for the profile and the totals.
  template <class Call>
  void wait_for_data(const Call& call);
  [[nodiscard]] const MicroBatch& micro_batch(int number);
  void put_in_flight(int number, Batch batch);
  [[nodiscard]] const StagePlan& plan_for(int micro_batches);
  [[nodiscard]] PlanShape shape_for(int micro_batches) const;

  Model& model_;
  ParameterStore& store_;
  GradSync& sync_;
  const Mesh& mesh_;
  MicroStepSettings settings_;
  BatchPrefetch batches_;
  std::unique_ptr<StepGraphs> graphs_;
  std::map<int, StagePlan> plans_;  // by number of micro-batches: a ramp has several
  // Of the batch.
  Request request_;
  std::int64_t done_ = 0;
  std::int64_t stop_ = 0;
  at::Tensor loss_sum_;
  double terms_ = 0, data_wait_s_ = 0;
  // Of the flush.
  int count_ = 0;
  bool last_ = false;
  int fetched_ = 0;
  struct Asked {
    int position;  // in the stage's order of micro-batches
    PendingLargest answer;
  };
  std::deque<Asked> asked_;
  std::map<int, MicroBatch> in_flight_;
  std::map<std::pair<int, int>, Model::BlockSaved> saved_;  // block, micro-batch
};

/// The gradient exchange over a store's buffers.
[[nodiscard]] GradSync make_grad_sync(const ParameterStore& store, const Mesh& mesh, bool overlap);

/// Where a rank's part of the model is, from the configuration, its tensor group and its stage.
[[nodiscard]] Placement place_in(const Config& config, Communicator& tensor, int stage, int stages);
[[nodiscard]] inline Placement make_placement(const Config& config, const Mesh& mesh) {
  return place_in(config, mesh.tensor(), mesh.place().pp_rank, mesh.layout().pipeline);
}

/// What this data rank owns of the optimizer's state: all, or its part with parallel.zero.
[[nodiscard]] Partition make_partition(const Config& config, const Mesh& mesh);

/// The order of computations that the configuration asks for.
[[nodiscard]] PlanKind plan_kind(const ParallelConfig& parallel);

}  // namespace cram
