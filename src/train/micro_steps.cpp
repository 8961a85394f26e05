#include "train/micro_steps.h"

#include <torch/types.h>

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

bool MicroSteps::run_batch(const Request& request) {
  request_ = request;
  done_ = 0;
  stopped_ = false;
  loss_sum_.zero_();
  terms_ = data_wait_s_ = 0;
  const bool one_stage = mesh_.layout().pipeline == 1;
  const std::int64_t per_flush = one_stage ? 1 : request.micro_batches;
  while (done_ < request.micro_batches) {
    if (one_stage && request.stop && done_ % request.ask_every == 0) stopped_ = request.stop();
    if (stopped_) return false;
    run(per_flush, /*last=*/request.exchange && done_ + per_flush == request.micro_batches);
  }
  return !stopped_;
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
  if (!stopped_) return;
  saved_.clear();
  in_flight_.clear();
}

// In the middle of a pipeline's plan this cannot block: what a stage does before its first block of micro-batch i needs
// nothing that another stage does after its own. (Of interleaved plans that is not true for more than two stages.)
void MicroSteps::ask(int block, int number, bool is_forward) {
  if (mesh_.layout().pipeline == 1 || !request_.stop || stopped_ || block != mesh_.place().pp_rank) return;
  if (settings_.plan == PlanKind::kInterleaved && number > 0) return;
  if (!is_forward && settings_.plan != PlanKind::kGpipe) return;
  if (number % request_.ask_every == 0) stopped_ = request_.stop();
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
  if (stopped_) return is_last ? at::Tensor() : make_activation(number);
  Model::BlockSaved& saved = saved_[{block, number}];
  at::Tensor output = model_.forward(block, micro_batch(number), input, saved);
  if (saved.loss_sum.defined()) loss_sum_.add_(saved.loss_sum);
  return output;
}

at::Tensor MicroSteps::backward(int block, int number, const at::Tensor& d_output) {
  ask(block, number, /*is_forward=*/false);
  if (stopped_) return block == 0 ? at::Tensor() : make_activation(number);
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
