#include "train/shared_rows.h"

#include <torch/types.h>

#include <utility>

namespace cram {
namespace {

bool sees_rows(const Mesh& mesh) { return mesh.is_first_stage() || mesh.is_last_stage(); }

class ReadRows final : public BatchSource {
 public:
  ReadRows(std::shared_ptr<ShardSet> shards, const LoaderSettings& settings, std::int64_t first_sample,
           Communicator& group)
      : loader_(std::move(shards), settings, first_sample), group_(group) {}

  Batch next() override {
    Loader::Loaded loaded = loader_.take();
    if (group_.size() > 1) group_.broadcast_(loaded.ids, 0);
    return std::move(loaded.batch);
  }

 private:
  Loader loader_;
  Communicator& group_;
};

class ToldRows final : public BatchSource {
 public:
  ToldRows(const ShardSet& shards, const LoaderSettings& settings, std::int64_t first_sample, Communicator& group)
      : stream_(shards, settings, first_sample),
        ids_(at::empty({settings.micro_batch, shards.seq_length()}, at::kInt)),
        group_(group) {}

  Batch next() override {
    group_.broadcast_(ids_, 0);
    return stream_.batch(stream_.samples(step_++), ids_);
  }

 private:
  RowStream stream_;
  at::Tensor ids_;  // [B,S]
  Communicator& group_;
  std::int64_t step_ = 0;
};

}  // namespace

std::unique_ptr<BatchSource> open_rows(std::shared_ptr<ShardSet> shards, const LoaderSettings& settings,
                                       std::int64_t first_sample, const Mesh& mesh) {
  if (!sees_rows(mesh)) return std::make_unique<RowCounts>(settings.micro_batch, shards->seq_length());
  Communicator& group = mesh.tensor_host();
  if (mesh.place().tp_rank > 0) return std::make_unique<ToldRows>(*shards, settings, first_sample, group);
  return std::make_unique<ReadRows>(std::move(shards), settings, first_sample, group);
}

Batch read_shared_batch(ShardSet& shards, std::int64_t first_row, std::int64_t rows, const MaskSettings& masks,
                        const Mesh& mesh) {
  if (!sees_rows(mesh)) return {rows, shards.seq_length()};
  const at::Tensor ids =
      mesh.place().tp_rank == 0 ? read_ids(shards, first_row, rows) : at::empty({rows, shards.seq_length()}, at::kInt);
  if (mesh.layout().tensor > 1) mesh.tensor_host().broadcast_(ids, 0);
  return masked_batch(consecutive_samples(0, first_row, rows), ids, masks);
}

}  // namespace cram
