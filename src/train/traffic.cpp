#include "train/traffic.h"

#include <torch/types.h>

#include "train/run_plan.h"

namespace cram {
namespace {

void add(Traffic& sum, const Traffic& more) {
  sum.tensor += more.tensor;
  sum.pipeline += more.pipeline;
  sum.data += more.data;
  sum.tied += more.tied;
}

}  // namespace

void TrafficMeter::begin_step() {
  for (Communicator* group : {&mesh_.tensor(), &mesh_.tensor_host(), &mesh_.pipeline(), &mesh_.data(), &mesh_.tied()}) {
    group->trace().reset_bytes();
  }
}

void TrafficMeter::end_step(std::int64_t batch_size) {
  const double on_host = &mesh_.tensor_host() == &mesh_.tensor() ? 0 : mesh_.tensor_host().trace().total_bytes();
  add(sent_, {mesh_.tensor().trace().total_bytes() + on_host, mesh_.pipeline().trace().total_bytes(),
              mesh_.data().trace().total_bytes(), mesh_.tied().trace().total_bytes()});
  if (mesh_.world().rank() != 0 || mesh_.world().size() == 1) return;
  auto plan = plans_.find(batch_size);
  if (plan == plans_.end()) {
    plan = plans_.emplace(batch_size, plan_run(config_, mesh_.layout(), batch_size, masked_per_row_).traffic).first;
  }
  add(planned_, plan->second);
}

TrafficTotals TrafficMeter::totals() const {
  const at::Tensor sums = at::tensor({sent_.tensor, sent_.pipeline, sent_.data, sent_.tied}, at::kDouble);
  mesh_.world().all_reduce_(sums);
  const auto* values = sums.const_data_ptr<double>();
  return {{values[0], values[1], values[2], values[3]}, planned_};
}

}  // namespace cram
