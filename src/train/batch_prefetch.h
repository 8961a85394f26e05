// Micro-batches from the host to the device, the next one on its way while the current one computes.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <optional>

#include "data/batch.h"

namespace cram {

/// How tensors get to a device.
class BatchTransfer {
 public:
  virtual ~BatchTransfer() = default;
  /// True when a copy runs beside computation.
  [[nodiscard]] virtual bool overlaps() const = 0;
  /// Starts copying; the tensors returned may be used after `finish`.
  [[nodiscard]] virtual Batch start(const Batch& host) = 0;
  /// What the caller's stream computes from now on comes after the copy.
  virtual void finish(const Batch& on_device) = 0;
};

/// A copy on a side stream for a GPU (page-locked host tensors make it asynchronous), none on a CPU.
[[nodiscard]] std::unique_ptr<BatchTransfer> make_batch_transfer(at::Device device);

/// The stream of micro-batches on the device, each exactly once and in order.
class BatchPrefetch {
 public:
  BatchPrefetch(std::function<Batch()> next, std::unique_ptr<BatchTransfer> transfer)
      : next_(std::move(next)), transfer_(std::move(transfer)) {}

  /// The next micro-batch. Rethrows what stopped the source.
  [[nodiscard]] Batch next();
  /// Fetches the one after and starts its copy, where copies overlap and none is waiting yet. For when the work on the
  /// current one was launched. A fault of the source is kept for `next`.
  void start();

 private:
  std::function<Batch()> next_;
  std::unique_ptr<BatchTransfer> transfer_;
  std::optional<Batch> waiting_;
  std::exception_ptr fault_;
};

}  // namespace cram
