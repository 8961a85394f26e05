#include "train/batch_prefetch.h"

#include <torch/types.h>

#ifdef CRAM_CUDA
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#endif

namespace cram {
namespace {

Batch on_device(const Batch& host, at::Device device) {
  const auto move = [&](const at::Tensor& x) { return x.to(device, /*non_blocking=*/true); };
  return {move(host.ids), move(host.labels), move(host.positions), host.rows};
}

class DirectTransfer final : public BatchTransfer {
 public:
  explicit DirectTransfer(at::Device device) : device_(device) {}
  bool overlaps() const override { return false; }
  Batch start(const Batch& host) override { return on_device(host, device_); }
  void finish(const Batch& /*on_device*/) override {}

 private:
  at::Device device_;
};

#ifdef CRAM_CUDA
class SideStreamTransfer final : public BatchTransfer {
 public:
  explicit SideStreamTransfer(at::Device device)
      : device_(device), stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index())) {}

  bool overlaps() const override { return true; }

  Batch start(const Batch& host) override {
    const c10::cuda::CUDAStreamGuard guard(stream_);
    Batch batch = on_device(host, device_);
    copied_.record(stream_);
    return batch;
  }

  void finish(const Batch& batch) override {
    const c10::cuda::CUDAStream computing = c10::cuda::getCurrentCUDAStream(device_.index());
    copied_.block(computing);
    // The memory belongs to the side stream: it may be given out again there only after the computation used it.
    for (const at::Tensor* x : {&batch.ids, &batch.labels, &batch.positions}) {
      c10::cuda::CUDACachingAllocator::recordStream(x->storage().data_ptr(), computing);
    }
  }

 private:
  at::Device device_;
  c10::cuda::CUDAStream stream_;
  at::cuda::CUDAEvent copied_;
};
#endif

}  // namespace

std::unique_ptr<BatchTransfer> make_batch_transfer(at::Device device) {
#ifdef CRAM_CUDA
  if (device.is_cuda()) return std::make_unique<SideStreamTransfer>(device);
#endif
  return std::make_unique<DirectTransfer>(device);
}

Batch BatchPrefetch::next() {
  if (fault_) std::rethrow_exception(fault_);
  Batch batch = waiting_ ? std::move(*waiting_) : transfer_->start(next_());
  waiting_.reset();
  transfer_->finish(batch);
  return batch;
}

void BatchPrefetch::start() {
  if (!transfer_->overlaps() || waiting_ || fault_) return;
  try {
    waiting_ = transfer_->start(next_());
  } catch (...) {
    fault_ = std::current_exception();
  }
}

}  // namespace cram
