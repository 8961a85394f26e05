#include "parallel/regions.h"

#include <torch/types.h>

#include "base/check.h"

namespace cram {

at::Tensor TensorRegion::gather_rows(const at::Tensor& rows) const {
  if (!sequence_parallel_) return rows;
  const at::Tensor whole = at::empty({rows.size(0) * size(), rows.size(1)}, rows.options());
  group_->all_gather(whole, rows.contiguous());
  return whole;
}

PendingTensor TensorRegion::sum_(const at::Tensor& part) const {
  if (!sequence_parallel_) {
    Work work = group_->all_reduce_async_(part);
    return {part, std::move(work)};
  }
  CRAM_CHECK(part.size(0) % size() == 0, ExitCode::kUsage, "parallel.sequence_parallel: ", part.size(0),
             " rows of a micro-batch cannot be shared out to ", size(), " tensor ranks");
  const at::Tensor rows = at::empty({part.size(0) / size(), part.size(1)}, part.options());
  Work work = group_->reduce_scatter_async(rows, part);
  return {rows, std::move(work)};
}

at::Tensor TensorRegion::enter(const at::Tensor& x) const { return gather_rows(x); }
PendingTensor TensorRegion::enter_backward_(const at::Tensor& dx) const { return sum_(dx); }
at::Tensor TensorRegion::leave_(const at::Tensor& y) const { return sum_(y).wait(); }
at::Tensor TensorRegion::leave_backward(const at::Tensor& dy) const { return gather_rows(dy); }

at::Tensor TensorRegion::own_rows(const at::Tensor& whole) const {
  if (!sequence_parallel_) return whole;
  const std::int64_t rows = whole.size(0) / size();
  return whole.narrow(0, rows * rank(), rows);
}

}  // namespace cram
