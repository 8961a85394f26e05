#include "train/batch_prefetch.h"

#include <torch/types.h>

#include "base/check.h"

#ifdef CRAM_CUDA
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#endif

namespace cram {
namespace {

Batch on_device(const Batch& host, at::Device device) {
  return host.map([&](const at::Tensor& x) { return x.to(device, /*non_blocking=*/true); });
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
    for (const Batch::Field& field : batch.fields()) {
      c10::cuda::CUDACachingAllocator::recordStream(field.tensor.storage().data_ptr(), computing);
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

void check_lengths(const Batch& batch) {
  const at::Tensor lengths = batch.find(field::kLengths);
  if (!lengths.defined()) return;
  CRAM_CHECK(lengths.is_cpu() && lengths.is_contiguous() && lengths.scalar_type() == at::kLong &&
                 lengths.numel() == batch.rows,
             ExitCode::kOther, "lengths of a micro-batch are ", batch.rows, " int64 numbers on the host, got ",
             lengths.toString(), " of ", lengths.numel());
  const auto* values = lengths.const_data_ptr<std::int64_t>();
  for (std::int64_t row = 0; row < lengths.numel(); ++row) {
    CRAM_CHECK(values[row] >= 1 && values[row] <= batch.seq_length, ExitCode::kData, "row ", row,
               " of a micro-batch has ", values[row], " tokens, expected 1 to ", batch.seq_length);
  }
}

Batch BatchPrefetch::fetch() {
  Batch batch = source_.next();
  check_lengths(batch);
  return batch;
}

Batch BatchPrefetch::next() {
  if (fault_) std::rethrow_exception(fault_);
  Batch batch = waiting_ ? std::move(*waiting_) : transfer_->start(fetch());
  waiting_.reset();
  transfer_->finish(batch);
  return batch;
}

void BatchPrefetch::start() {
  if (!transfer_->overlaps() || waiting_ || fault_) return;
  try {
    waiting_ = transfer_->start(fetch());
  } catch (...) {
    fault_ = std::current_exception();
  }
}

}  // namespace cram
