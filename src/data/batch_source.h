// Where a trainer's micro-batches come from: the loader, made-up rows, later fine-tuning sets.
#pragma once

#include "base/batch.h"

namespace cram {

class BatchSource {
 public:
  virtual ~BatchSource() = default;
  BatchSource() = default;
  BatchSource(const BatchSource&) = delete;
  BatchSource& operator=(const BatchSource&) = delete;

  /// This rank's next micro-batch, on the host. May block; rethrows what stopped the source.
  [[nodiscard]] virtual Batch next() = 0;
};

/// Knows how many rows a micro-batch has and nothing else: a pipeline stage between the first and the last reads no
/// data.
class RowCounts final : public BatchSource {
 public:
  RowCounts(std::int64_t rows, std::int64_t seq_length) : rows_(rows), seq_length_(seq_length) {}
  Batch next() override { return {rows_, seq_length_}; }

 private:
  std::int64_t rows_, seq_length_;
};

}  // namespace cram
