// Rows to masked batches, ahead of time: one prefetch thread, the only HDF5 reader while it lives.
#pragma once

#include <cstdint>
#include <memory>

#include "data/batch_source.h"
#include "data/masking.h"
#include "data/shard_set.h"

namespace cram {

struct LoaderSettings {
  std::int64_t micro_batch = 0;  ///< rows a batch
  std::uint64_t seed = 0;        ///< of masks and shuffling
  double mask_rate = 0.25;
  bool shuffle = false;
  int dp_rank = 0;
  int dp_size = 1;
  int prefetch = 4;         ///< batches made ahead; 0 makes each one on the calling thread
  bool pin_memory = false;  ///< page-locked tensors, for asynchronous copies to a GPU
};

/// The stream of micro-batches of one data-parallel rank. The stream depends on (data, seed, mask_rate, shuffle,
/// first_sample, micro_batch, dp) alone.
class Loader final : public BatchSource {
 public:
  Loader(std::shared_ptr<ShardSet> shards, const LoaderSettings& settings, std::int64_t first_sample);
  ~Loader() override;

  /// Micro-step j = 0, 1, ... of this rank: the `micro_batch` samples from first_sample + (j·dp_size +
  /// dp_rank)·micro_batch on. Blocks until it is ready; rethrows what stopped the reader thread.
  [[nodiscard]] Batch next() override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Rows [first_row, first_row+rows) in their prepared order, masked: held-out evaluation uses seed 0 and epoch 0.
[[nodiscard]] Batch make_batch(ShardSet& shards, std::int64_t first_row, std::int64_t rows,
                               const MaskSettings& settings, std::int64_t epoch = 0);

}  // namespace cram
