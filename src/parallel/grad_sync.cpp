#include "parallel/grad_sync.h"

#include <torch/types.h>

#include <algorithm>

namespace cram {

void reduce_gradients(Communicator& data, const std::vector<at::Tensor>& flat_gradients) {
  std::vector<Work> pending;
  for (const at::Tensor& flat : flat_gradients) {
    for (std::int64_t begin = 0; begin < flat.numel(); begin += kBucketElements) {
      pending.push_back(data.all_reduce_async_(flat.narrow(0, begin, std::min(kBucketElements, flat.numel() - begin))));
    }
  }
  for (Work& work : pending) work.wait();
}

}  // namespace cram
