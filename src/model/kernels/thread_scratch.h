// Scratch memory of CPU kernels.
#pragma once

#include <ATen/Parallel.h>
#include <torch/types.h>

#include <cstdint>

namespace cram::kernels {

/// A piece of memory for each thread of a parallel region, cache lines apart; from the tensors' allocator, so that it
/// is there already after the first step.
class ThreadScratch {
 public:
  explicit ThreadScratch(std::int64_t bytes)
      : memory_(at::empty({at::get_num_threads(), (bytes + 63) / 64 * 64}, at::kByte)) {}
  /// The calling thread's piece.
  [[nodiscard]] void* mine() const { return memory_.data_ptr<std::uint8_t>() + at::get_thread_num() * memory_.size(1); }

 private:
  at::Tensor memory_;
};

}  // namespace cram::kernels
