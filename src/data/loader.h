// Rows to masked batches, ahead of time: one prefetch thread, the only HDF5 reader while it lives.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "data/batch_source.h"
#include "data/masking.h"
#include "data/sampler.h"
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

/// What the rows of a data rank's micro-batches are and how they are masked, without reading one: a pure function of
/// the split's size, seed, mask_rate, shuffle, first_sample, micro_batch and dp. Who is handed the rows needs no file.
class RowStream {
 public:
  /// `shards` gives sizes alone.
  RowStream(const ShardSet& shards, const LoaderSettings& settings, std::int64_t first_sample);

  /// The samples of micro-step j = 0, 1, ...: the `micro_batch` samples from first_sample + (j·dp_size +
  /// dp_rank)·micro_batch on.
  [[nodiscard]] std::vector<SampleId> samples(std::int64_t step);
  /// The masked batch of these rows: `ids` [B,S] int32, unmasked, in the order of `samples`.
  [[nodiscard]] Batch batch(const std::vector<SampleId>& samples, const at::Tensor& ids) const;

 private:
  LoaderSettings settings_;
  MaskSettings masks_;
  std::int64_t first_sample_;
  Sampler sampler_;
};

/// The stream of micro-batches of one data-parallel rank, read from its shards.
class Loader final : public BatchSource {
 public:
  Loader(std::shared_ptr<ShardSet> shards, const LoaderSettings& settings, std::int64_t first_sample);
  ~Loader() override;

  struct Loaded {
    Batch batch;
    at::Tensor ids;  ///< [B,S] int32: the rows before they were masked
  };
  /// Micro-step j = 0, 1, ... of the RowStream. Blocks until it is ready; rethrows what stopped the reader thread.
  [[nodiscard]] Loaded take();
  [[nodiscard]] Batch next() override { return take().batch; }

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Rows [first_row, first_row+rows) in their prepared order, unmasked: [rows,S] int32.
[[nodiscard]] at::Tensor read_ids(ShardSet& shards, std::int64_t first_row, std::int64_t rows);

[[nodiscard]] std::vector<SampleId> consecutive_samples(std::int64_t epoch, std::int64_t first_row, std::int64_t rows);

/// These rows masked: held-out evaluation uses seed 0 and epoch 0.
[[nodiscard]] Batch masked_batch(const std::vector<SampleId>& samples, const at::Tensor& ids,
                                 const MaskSettings& settings);

/// Rows [first_row, first_row+rows) in their prepared order, masked.
[[nodiscard]] Batch make_batch(ShardSet& shards, std::int64_t first_row, std::int64_t rows,
                               const MaskSettings& settings, std::int64_t epoch = 0);

}  // namespace cram
