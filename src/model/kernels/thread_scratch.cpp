#include "model/kernels/thread_scratch.h"

#include <ATen/Parallel.h>
#include <torch/types.h>

namespace cram::kernels {

ThreadScratch::ThreadScratch(std::int64_t bytes)
    : memory_(at::empty({at::get_num_threads(), (bytes + 63) / 64 * 64}, at::kByte)) {}

void* ThreadScratch::mine() const {
  return memory_.data_ptr<std::uint8_t>() + at::get_thread_num() * memory_.stride(0);
}

}  // namespace cram::kernels
