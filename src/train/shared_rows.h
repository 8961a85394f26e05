// Rows of shards for the ranks of a tensor group: one of them reads, the others are told the ids.
#pragma once

#include <cstdint>
#include <memory>

#include "data/loader.h"
#include "parallel/mesh.h"

namespace cram {

/// This rank's micro-batches from prepared shards, from `first_sample` on; `settings` says what its data rank trains
/// on. Stages between the first and the last read nothing and know row counts only. Collective over tensor groups at
/// every next(): each rank makes the masks itself from the rows' numbers, so ids alone travel (B·S·4 bytes by the
/// reading rank).
[[nodiscard]] std::unique_ptr<BatchSource> open_rows(std::shared_ptr<ShardSet> shards, const LoaderSettings& settings,
                                                     std::int64_t first_sample, const Mesh& mesh);

/// Held-out rows [first_row, first_row+rows), masked, on every rank that needs them: read by one rank of the tensor
/// group. Collective over it.
[[nodiscard]] Batch read_shared_batch(ShardSet& shards, std::int64_t first_row, std::int64_t rows,
                                      const MaskSettings& masks, const Mesh& mesh);

}  // namespace cram
