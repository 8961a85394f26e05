// The borders of a tensor-parallel region: where activations go from "whole on every rank" (or, sequence parallel,
// "rows shared out") to "a part of the columns on every rank" and back.
//
// f and g of Megatron (Shoeybi et al. 2019, section 3) and their sequence-parallel forms (Korthikanti et al. 2022,
// section 4.2.2). Each direction of an operator is the transpose of the other: forward identity, backward sum; or
// forward gather rows, backward sum and scatter rows. With sequence parallelism rank r holds the r-th of t contiguous
// parts of the N = B*S rows, so N % t = 0.
#pragma once

#include <ATen/core/Tensor.h>

#include "parallel/communicator.h"

namespace cram {

/// A tensor that an operation is still working on.
class PendingTensor {
 public:
  PendingTensor(at::Tensor tensor, Work work) : tensor_(std::move(tensor)), work_(std::move(work)) {}
  [[nodiscard]] at::Tensor wait() {
    work_.wait();
    return tensor_;
  }

 private:
  at::Tensor tensor_;
  Work work_;
};

/// A view of the tensor-parallel group, cheap to copy; the group must outlive it. In a group of one nothing is moved.
class TensorRegion {
 public:
  /// Not explicit: a group alone means no sequence parallelism.
  TensorRegion(Communicator& group, bool sequence_parallel = false)  // NOLINT
      : group_(&group), sequence_parallel_(sequence_parallel && group.size() > 1) {}

  [[nodiscard]] Communicator& group() const { return *group_; }
  [[nodiscard]] int rank() const { return group_->rank(); }
  [[nodiscard]] int size() const { return group_->size(); }
  [[nodiscard]] bool sequence_parallel() const { return sequence_parallel_; }

  /// Into the region: x [N or N/t,H] -> [N,H].
  [[nodiscard]] at::Tensor enter(const at::Tensor& x) const;
  /// Transpose of `enter`: this rank's part of dx [N,H] -> the sum, [N or N/t,H]. Started; other work may go on. `dx`
  /// is overwritten.
  [[nodiscard]] PendingTensor enter_backward_(const at::Tensor& dx) const;
  /// Out of the region: this rank's part of y [N,H] -> the sum, [N or N/t,H]. `y` is overwritten.
  [[nodiscard]] at::Tensor leave_(const at::Tensor& y) const;
  /// Transpose of `leave_`: dy [N or N/t,H] -> [N,H].
  [[nodiscard]] at::Tensor leave_backward(const at::Tensor& dy) const;

  /// This rank's rows of a tensor [N,H] that all ranks have, and the first of them; all without sequence parallelism.
  [[nodiscard]] at::Tensor own_rows(const at::Tensor& whole) const;
  /// Rows [N or N/t,H] -> [N,H]: for what needs all of them, such as picking masked positions.
  [[nodiscard]] at::Tensor gather_rows(const at::Tensor& rows) const;
  /// Number of the first of this rank's rows when each has `rows`.
  [[nodiscard]] std::int64_t first_row(std::int64_t rows) const { return sequence_parallel_ ? rows * rank() : 0; }
  /// How many of `whole` rows this rank holds outside of regions.
  [[nodiscard]] std::int64_t rows_held(std::int64_t whole) const { return sequence_parallel_ ? whole / size() : whole; }

 private:
  [[nodiscard]] PendingTensor sum_(const at::Tensor& part) const;
  Communicator* group_;
  bool sequence_parallel_;
};

}  // namespace cram
