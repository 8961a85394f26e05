// Micro-batches from the host to the device, the next one on its way while the current one computes.
#pragma once

#include <exception>
#include <memory>
#include <optional>

#include "data/batch_source.h"

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

/// Refuses (Error(kData)) a batch on the host with a row of no tokens, or of more than it has: nothing could attend to
/// anything there.
void check_lengths(const Batch& batch);

/// The stream of micro-batches on the device, each exactly once and in order.
class BatchPrefetch {
 public:
  /// The source must outlive it.
  BatchPrefetch(BatchSource& source, std::unique_ptr<BatchTransfer> transfer)
      : source_(source), transfer_(std::move(transfer)) {}

  /// The next micro-batch. Rethrows what stopped the source.
  [[nodiscard]] Batch next();
  /// Fetches the one after and starts its copy, where copies overlap and none is waiting yet. For when the work on the
  /// current one was launched. A fault of the source is kept for `next`.
  void start();

 private:
  [[nodiscard]] Batch fetch();
  BatchSource& source_;
  std::unique_ptr<BatchTransfer> transfer_;
  std::optional<Batch> waiting_;
  std::exception_ptr fault_;
};

}  // namespace cram
