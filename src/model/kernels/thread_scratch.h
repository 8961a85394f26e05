// Scratch memory of CPU kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace cram::kernels {

/// A piece of memory for each thread of a parallel region, cache lines apart; from the tensors' allocator, so that it
/// is there already after the first step.
class ThreadScratch {
 public:
  explicit ThreadScratch(std::int64_t bytes);
  /// The calling thread's piece.
  [[nodiscard]] void* mine() const;

 private:
  at::Tensor memory_;  // [threads, bytes]
};

}  // namespace cram::kernels
