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
    buffers.push_back({b.grad, b.owned_grad, b.buckets, {}, b.partial, b.tied});
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

Placement place_in(const Config& config, Communicator& tensor, Communicator& pipeline) {
  const ParallelConfig& parallel = config.parallel;
  return {TensorRegion(tensor, parallel.sequence_parallel), &pipeline,
          split_layers(config.model.layers, pipeline.size() * parallel.virtual_stages, parallel.split)};
}

MicroSteps::MicroSteps(Encoder& encoder, ParameterStore& store, GradSync& sync, const Mesh& mesh, const Config& config,
                       std::function<Batch()> next_batch, std::unique_ptr<StepGraphs> graphs)
    : encoder_(encoder),
      store_(store),
      sync_(sync),
      mesh_(mesh),
      config_(config),
      batches_(std::move(next_batch), make_batch_transfer(store.device())),
      graphs_(std::move(graphs)),
      loss_sum_(at::zeros({}, at::TensorOptions().dtype(at::kDouble).device(store.device()))) {}

PlanShape MicroSteps::shape_for(int micro_batches) const {
  return {mesh_.layout().pipeline, encoder_.blocks() / mesh_.layout().pipeline, micro_batches};
}

const StagePlan& MicroSteps::plan_for(int micro_batches) {
  const auto found = plans_.find(micro_batches);
  if (found != plans_.end()) return found->second;
  std::vector<StagePlan> all = make_pipeline_plan(plan_kind(config_.parallel), shape_for(micro_batches));
  return plans_[micro_batches] = std::move(all[static_cast<std::size_t>(mesh_.place().pp_rank)]);
}

bool MicroSteps::run_batch(std::int64_t step, std::int64_t first_sample, std::int64_t micro_batches,
                           const std::function<bool()>& stop, bool exchange) {
  step_ = step;
  first_sample_ = first_sample;
  done_ = 0;
  loss_sum_.zero_();
  masked_ = data_wait_s_ = 0;
  const std::int64_t per_flush = mesh_.layout().pipeline == 1 ? 1 : micro_batches;
  while (done_ < micro_batches) {
    if (stop && stop()) return false;
    run(per_flush, /*last=*/exchange && done_ + per_flush == micro_batches);
  }
  return true;
}

void MicroSteps::run(std::int64_t count, bool last) {
  count_ = static_cast<int>(count);
  last_ = last;
  fetched_ = 0;
  if (graphs_ != nullptr && count == 1 && !(last && mesh_.layout().data > 1)) {
    last_ = false;  // GradSync::finish does what there is to do: the exchange is no part of a record
    const MicroBatch batch = micro_batch(0);
    graphs_->run(batch, [this](const MicroBatch& fixed) {
      saved_.clear();
      in_flight_[0] = fixed;
      run_plan();
    });
    in_flight_.clear();  // a replay does not
  } else {
    run_plan();
  }
  wait_for_data([&] { batches_.start(); });  // while the device is busy
  done_ += count;
}

void MicroSteps::run_plan() { run_pipeline(plan_for(count_), shape_for(count_), *this, mesh_.pipeline()); }

template <class Call>
void MicroSteps::wait_for_data(const Call& call) {
  const double from_s = steady_now_s();
  const Timed timed(Section::kDataWait);
  call();
  data_wait_s_ += steady_now_s() - from_s;
}

MicroSteps::Totals MicroSteps::totals() const {
  return {loss_sum_.item<double>(), mesh_.is_last_stage() ? masked_ : 0, data_wait_s_};
}

const MicroBatch& MicroSteps::micro_batch(int number) {
  // A rank's first block sees the micro-batches in order; the others find them here.
  while (fetched_ <= number) {
    Batch batch;
    wait_for_data([&] { batch = batches_.next(); });
    masked_ += static_cast<double>(batch.labels.numel());
    const std::int64_t rows = config_.train.micro_batch_size;
    const std::int64_t index = (done_ + fetched_) * mesh_.layout().data + mesh_.place().dp_rank;
    const DropoutSource dropout{config_.model.dropout, static_cast<std::uint64_t>(config_.run.seed), step_,
                                first_sample_ + index * rows, config_.model.seq_length};
    in_flight_[fetched_++] = {batch.ids, batch.positions, batch.labels, dropout};
  }
  return in_flight_.at(number);
}

at::Tensor MicroSteps::make_activation() {
  return encoder_.make_activation(config_.train.micro_batch_size, config_.model.seq_length);
}

at::Tensor MicroSteps::forward(int block, int number, const at::Tensor& input) {
  Encoder::BlockSaved& saved = saved_[{block, number}];
  at::Tensor output = encoder_.forward_block(block, micro_batch(number), input, saved);
  if (saved.loss_sum.defined()) loss_sum_.add_(saved.loss_sum);
  return output;
}

at::Tensor MicroSteps::backward(int block, int number, const at::Tensor& d_output) {
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
  at::Tensor d_input =
      encoder_.backward_block(block, micro_batch(number), d_output, saved_.at({block, number}), complete);
  saved_.erase({block, number});
  // Backwards pass a rank's blocks from the last to the first.
  if (block == mesh_.place().pp_rank) in_flight_.erase(number);
  return d_input;
}

}  // namespace cram
