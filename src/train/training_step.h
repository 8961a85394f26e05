// One training step, the only place that puts it together: forward and backward of all micro-batches, reduction of the
// gradients, one exchange between all ranks, clipping, update.
#pragma once

#include <array>
#include <functional>
#include <memory>

#include "train/micro_steps.h"
#include "train/optimizer.h"

namespace cram {

struct TrainingStepSettings {
  MicroStepSettings micro_steps;
  bool overlap = true;  ///< gradients are exchanged while the last backward pass is running
  std::string optimizer = "adamw";
  OptimizerSettings rule;
  double clip = 0.5;  ///< largest global L2 norm of the mean's gradient; 0 = no clipping
};
[[nodiscard]] TrainingStepSettings training_step_settings(const Config& config);

class TrainingStep {
 public:
  /// All must outlive it. Collective over the mesh.
  TrainingStep(Model& model, ParameterStore& store, const Mesh& mesh, const TrainingStepSettings& settings,
               BatchSource& source, std::unique_ptr<StepGraphs> graphs = nullptr);

  struct Request {
    std::int64_t step = 1;           ///< from 1
    std::int64_t update = 1;         ///< from 1: fewer than steps where some were skipped
    std::int64_t first_sample = 0;   ///< global
    std::int64_t micro_batches = 1;  ///< a data rank
    double lr = 0;
  };
  /// What ranks look at in a step; all may be empty.
  struct Watch {
    std::function<int()> signal = {};      ///< the stop signal that this rank has received, or 0
    std::function<double()> clock_s = {};  ///< rank 0's reading counts
    std::function<void()> reduced = {};    ///< called with the reduced gradients of the loss sum
  };
  struct Result {
    bool completed = false;  ///< false: a signal came; the batch is dropped, the gradients are cleared
    bool finite = true;      ///< false: loss or gradient were not, and nothing was updated
    int signal = 0;          ///< the largest that has reached any rank, the same on all
    double loss = 0;         ///< mean over the terms, of all ranks
    double grad_norm = 0;    ///< of the mean's gradient, before clipping
    double count = 0;        ///< terms
    double clock_s = 0;      ///< rank 0's, as of the exchange
    double data_wait_s = 0;  ///< this rank's
    // Parts of this rank's time: micro-steps, what of the reduction they did not hide, the rest.
    double compute_s = 0, reduce_s = 0, update_s = 0;
  };
  [[nodiscard]] Result run(const Request& request, const Watch& watch);
  [[nodiscard]] Result run(const Request& request);

  /// The micro-steps alone, and gradients as they are afterwards on this rank: for measurements.
  void accumulate(const Request& request);
  /// Loss sum and terms of this rank's last micro-steps; waits for the device.
  [[nodiscard]] MicroSteps::Totals own_totals() const { return micro_steps_.totals(); }
  /// The same without any exchange of gradients, with an update of what this rank has: for measurements.
  void run_without_exchange(const Request& request, Result& result);

  /// Agrees on the signal now: before the first step of a run. Collective over the world.
  [[nodiscard]] int agree_on_signal(const Watch& watch) const;

 private:
  /// The one exchange of a step: sums of what each rank adds.
  struct Exchanged {
    double loss_sum = 0, count = 0, sum_of_squares = 0, clock_s = 0, micro_batch_s = 0;
    int signal = 0;
  };
  [[nodiscard]] Exchanged exchange(const MicroSteps::Totals& own, double micro_batch_s, const Watch& watch) const;

  ParameterStore& store_;
  const Mesh& mesh_;
  TrainingStepSettings settings_;
  GradSync sync_;
  MicroSteps micro_steps_;
  Optimizer optimizer_;
  std::int64_t ask_every_ = 1;  ///< micro-batches; agreed on in the exchange before
};

}  // namespace cram
