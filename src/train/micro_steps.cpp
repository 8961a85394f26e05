#include "train/micro_steps.h"

#include <torch/types.h>

#include <algorithm>

#include "base/clock.h"
#include "base/profile.h"

namespace cram {
PlanKind plan_kind(const ParallelConfig& parallel) {
  if (parallel.virtual_stages > 1) return PlanKind::kInterleaved;
  return parallel.schedule == "gpipe" ? PlanKind::kGpipe : PlanKind::kOneForwardOneBackward;
}

GradSync make_grad_sync(const ParameterStore& store, const Mesh& mesh, bool overlap) {
  std::vector<GradSync::Buffer> buffers;
  for (const FlatBuffers& b : store.buffers()) {
    // Of whole matrices every rank gets all sums: their parts are of unequal size.
    buffers.push_back(
        {b.grad, b.traits.whole_matrices ? b.grad : b.owned_grad, b.buckets, {}, b.traits.partial, b.traits.tied});
  }
  for (ParamId id = 0; id < store.size(); ++id) {
    const ParameterStore::Location where = store.location(id);
    buffers[where.buffer].parameters.push_back({where.begin, where.end});
  }
  return GradSync(std::move(buffers), mesh, overlap);
}

Partition make_partition(const Config& config, const Mesh& mesh) {
  if (config.parallel.zero == 0) return {};
  return {mesh.place().dp_rank, mesh.layout().data};
}

Placement place_in(const Config& config, Communicator& tensor, int stage, int stages) {
  const ParallelConfig& parallel = config.parallel;
  return {TensorRegion(tensor, parallel.sequence_parallel), stage, stages,
          split_layers(config.model.layers, stages * parallel.virtual_stages, parallel.split)};
}

MicroStepSettings micro_step_settings(const Config& config) {
  return {config.train.micro_batch_size, config.model.dropout, static_cast<std::uint64_t>(config.run.seed),
          plan_kind(config.parallel)};
}

MicroSteps::MicroSteps(Model& model, ParameterStore& store, GradSync& sync, const Mesh& mesh,
                       const MicroStepSettings& settings, BatchSource& source, std::unique_ptr<StepGraphs> graphs)
    : model_(model),
      store_(store),
      sync_(sync),
      mesh_(mesh),
      settings_(settings),
      batches_(source, make_batch_transfer(store.device())),
      graphs_(std::move(graphs)),
      loss_sum_(at::zeros({}, at::TensorOptions().dtype(at::kDouble).device(store.device()))) {}

PlanShape MicroSteps::shape_for(int micro_batches) const {
  return {mesh_.layout().pipeline, model_.encoder().blocks() / mesh_.layout().pipeline, micro_batches};
}

const StagePlan& MicroSteps::plan_for(int micro_batches) {
  const auto found = plans_.find(micro_batches);
  if (found != plans_.end()) return found->second;
  std::vector<StagePlan> all = make_pipeline_plan(settings_.plan, shape_for(micro_batches));
  return plans_[micro_batches] = std::move(all[static_cast<std::size_t>(mesh_.place().pp_rank)]);
}

std::int64_t MicroSteps::run_batch(const Request& request) {
  request_ = request;
  done_ = 0;
  stop_ = 0;
  loss_sum_.zero_();
  terms_ = data_wait_s_ = 0;
  const bool one_stage = mesh_.layout().pipeline == 1;
  const std::int64_t per_flush = one_stage ? 1 : request.micro_batches;
  while (done_ < request.micro_batches) {
    if (one_stage && request.ask && done_ % request.ask_every == 0) stop_ = request.ask().wait();
    if (stop_ != 0) break;
    run(per_flush, /*last=*/request.exchange && done_ + per_flush == request.micro_batches);
  }
  return stop_;
}

void MicroSteps::run(std::int64_t count, bool last) {
  count_ = static_cast<int>(count);
  last_ = last;
  fetched_ = 0;
  if (graphs_ != nullptr && count == 1 && !(last && mesh_.layout().data > 1)) {
    last_ = false;  // GradSync::finish does what there is to do: the exchange is no part of a record
    const Batch batch = micro_batch(0).fields;
    graphs_->run(batch, [this](const Batch& fixed) {
      saved_.clear();
      put_in_flight(0, fixed);
      run_plan();
    });
    in_flight_.clear();  // a replay does not
  } else {
    run_plan();
  }
  wait_for_data([&] { batches_.start(); });  // while the device is busy
  done_ += count;
}

void MicroSteps::run_plan() {
  run_pipeline(plan_for(count_), shape_for(count_), *this, mesh_.pipeline());
  // Too late for this batch. A signal stays, and is seen in the exchange at the step's end.
  for (Asked& asked : asked_) (void)asked.answer.wait();
  asked_.clear();
  if (stop_ == 0) return;
  saved_.clear();
  in_flight_.clear();
}

// In the middle of a pipeline's plan a stage may not wait for one that is behind it, so an answer is heard `lag`
// micro-batches later. By then every stage has asked, whatever this one does next: 1F1B lets the first stage run ahead
// of the last by fewer micro-batches than there are stages (interleaved: by less than two groups of them), and with
// GPipe what the others need of this stage's earlier micro-batches has been sent. All stages hear an answer at the same
// position, before their last backward block: ranks that share a stage, or the exchange of gradients, stop alike.
void MicroSteps::ask(int block, int number, bool is_forward) {
  const int stages = mesh_.layout().pipeline;
  if (stages == 1 || !request_.ask || block != mesh_.place().pp_rank) return;
  if (!is_forward && settings_.plan != PlanKind::kGpipe) return;
  const int lag = settings_.plan == PlanKind::kInterleaved ? 3 * stages : stages;
  const int position = is_forward ? number : count_ + number;
  for (; !asked_.empty() && asked_.front().position + lag <= position; asked_.pop_front()) {
    stop_ = std::max(stop_, asked_.front().answer.wait());
  }
  if (position % request_.ask_every == 0) asked_.push_back({position, request_.ask()});
}

template <class Call>
void MicroSteps::wait_for_data(const Call& call) {
  const double from_s = steady_now_s();
  const Timed timed(Section::kDataWait);
  call();
  data_wait_s_ += steady_now_s() - from_s;
}

MicroSteps::Totals MicroSteps::totals() const { return {loss_sum_.item<double>(), terms_, data_wait_s_}; }

void MicroSteps::put_in_flight(int number, Batch batch) {
  const std::int64_t index = (done_ + number) * mesh_.layout().data + mesh_.place().dp_rank;
  const DropoutSource dropout{settings_.dropout, settings_.seed, request_.step,
                              request_.first_sample + index * settings_.micro_batch, batch.seq_length};
  in_flight_[number] = model_.micro_batch(std::move(batch), dropout);
}

const MicroBatch& MicroSteps::micro_batch(int number) {
  // A rank's first block sees the micro-batches in order; the others find them here.
  while (fetched_ <= number) {
    Batch batch;
    wait_for_data([&] { batch = batches_.next(); });
    if (model_.has_objective()) terms_ += static_cast<double>(model_.objective().count(batch));
    put_in_flight(fetched_++, std::move(batch));
  }
  return in_flight_.at(number);
}

at::Tensor MicroSteps::make_activation(int number) {
  const Batch& batch = micro_batch(number).fields;
  return model_.encoder().make_activation(batch.rows, batch.seq_length);
}

at::Tensor MicroSteps::forward(int block, int number, const at::Tensor& input) {
  ask(block, number, /*is_forward=*/true);
  const bool is_last = block + 1 == model_.encoder().blocks();
  // Stopped: messages go on until all are received, nothing is computed.
  if (stop_ != 0) return is_last ? at::Tensor() : make_activation(number);
  Model::BlockSaved& saved = saved_[{block, number}];
  at::Tensor output = model_.forward(block, micro_batch(number), input, saved);
  if (saved.loss_sum.defined()) loss_sum_.add_(saved.loss_sum);
  return output;
}

at::Tensor MicroSteps::backward(int block, int number, const at::Tensor& d_output) {
  ask(block, number, /*is_forward=*/false);
  if (stop_ != 0) return block == 0 ? at::Tensor() : make_activation(number);
  Encoder::GradientsComplete complete;
  if (last_ && number + 1 == count_) {
    complete = [&](ParamId first, ParamId end) {
      for (ParamId id = first; id < end; ++id) {
        const ParameterStore::Location where = store_.location(id);
        sync_.ready(where.buffer, {where.begin, where.end});
      }
      sync_.poll();
    };
  }
  at::Tensor d_input = model_.backward(block, micro_batch(number), d_output, saved_.at({block, number}), complete);
  saved_.erase({block, number});
  // Backwards pass a rank's blocks from the last to the first.
  if (block == mesh_.place().pp_rank) in_flight_.erase(number);
  return d_input;
}

}  // namespace cram
