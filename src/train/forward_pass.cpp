#include "train/forward_pass.h"

#include <torch/types.h>

#include "base/check.h"
#include "train/batch_prefetch.h"

namespace cram {

at::Tensor ForwardPass::run(const Batch& batch, const at::Tensor& picks) {
  check_lengths(batch);
  const TensorRegion& tensor = model_.encoder().place().tensor;
  // Sequence parallelism needs rows that the tensor ranks can share out; whole repeated rows change nothing for the
  // first ones (an odd sentence, the last rows of an evaluation).
  const int times = tensor.sequence_parallel() && batch.tokens() % tensor.size() != 0 ? tensor.size() : 1;
  Batch rows(batch.rows * times, batch.seq_length);
  for (const std::string_view name : {field::kIds, field::kLengths}) {
    const at::Tensor field = batch.find(name);
    if (!field.defined()) continue;
    const at::Tensor on_device = field.to(store_.device());
    rows.set(name,
             times == 1 ? on_device : at::cat(std::vector<at::Tensor>(static_cast<std::size_t>(times), on_device)));
  }
  batch_ = {std::move(rows), picks, {}};
  last_ = at::Tensor();
  const int stages = pipeline_.size();
  const PlanShape shape{stages, model_.encoder().blocks() / stages, 1};
  const std::vector<StagePlan> plans = make_pipeline_plan(PlanKind::kForward, shape);
  run_pipeline(plans[static_cast<std::size_t>(pipeline_.rank())], shape, *this, pipeline_);
  return std::move(last_);
}

at::Tensor ForwardPass::forward(int block, int /*micro_batch*/, const at::Tensor& input) {
  at::Tensor output = model_.encoder().forward_block(block, batch_, input, nullptr);
  if (block + 1 < model_.encoder().blocks()) return output;
  last_ = std::move(output);
  return {};
}

at::Tensor ForwardPass::backward(int /*block*/, int /*micro_batch*/, const at::Tensor& /*d_output*/) {
  fail(ExitCode::kOther, "a forward pass has no backward pass");
}

at::Tensor ForwardPass::make_activation(int /*micro_batch*/) {
  return model_.encoder().make_activation(batch_.fields.rows, batch_.fields.seq_length);
}

Objective::Evaluation ForwardPass::evaluate(const Batch& batch) {
  const Batch on_device = batch.map([&](const at::Tensor& x) { return x.to(store_.device()); });
  const at::Tensor hidden = run(batch, model_.micro_batch(on_device).picks);
  if (model_.has_objective()) return model_.objective().evaluate(hidden, on_device);
  const at::TensorOptions options = at::TensorOptions().device(store_.device());
  return {at::zeros({}, options.dtype(at::kDouble)), at::zeros({}, options.dtype(at::kLong))};
}

at::Tensor ForwardPass::share(at::Tensor made) const {
  const int last = pipeline_.size() - 1;
  if (last == 0) return made;
  // Only the last stage knows the shape.
  const at::Tensor shape = at::zeros({8}, at::TensorOptions().dtype(at::kLong).device(store_.device()));
  if (made.defined()) {
    std::vector<std::int64_t> sizes = made.sizes().vec();
    sizes.insert(sizes.begin(), static_cast<std::int64_t>(sizes.size()));
    sizes.resize(8);
    shape.copy_(at::tensor(sizes, at::kLong));
  }
  pipeline_.broadcast_(shape, last);
  const at::Tensor host = shape.cpu();
  const auto* values = host.const_data_ptr<std::int64_t>();
  const std::vector<std::int64_t> sizes(values + 1, values + 1 + values[0]);
  at::Tensor whole =
      made.defined()
          ? made.contiguous()
          : at::empty(sizes, at::TensorOptions().dtype(working_type(store_.precision())).device(store_.device()));
  pipeline_.broadcast_(whole, last);
  return whole;
}

namespace {

Batch batch_of(const at::Tensor& ids, const at::Tensor& lengths) {
  Batch batch(ids.size(0), ids.size(1), {{std::string(field::kIds), ids}});
  if (lengths.defined()) batch.set(field::kLengths, lengths);
  return batch;
}

}  // namespace

at::Tensor ForwardPass::outputs(const at::Tensor& ids, const at::Tensor& picks, const at::Tensor& lengths) {
  const at::Tensor hidden = run(batch_of(ids, lengths), picks.to(store_.device()));
  return share(model_.has_objective() ? model_.objective().outputs(hidden) : at::Tensor());
}

at::Tensor ForwardPass::hidden(const at::Tensor& ids, const at::Tensor& lengths) {
  at::Tensor hidden = run(batch_of(ids, lengths), {});
  if (hidden.defined()) hidden = hidden.narrow(0, 0, ids.numel()).view({ids.size(0), ids.size(1), -1});
  return share(hidden);
}

}  // namespace cram
