// Orders of packed blocks: the curricula of the recipe.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "data/id_vector.h"

namespace cram {

/// none, randomized, sentence-length, unigram, fragment.
[[nodiscard]] const std::vector<std::string>& block_order_names();

struct BlockOrderContext {
  std::int64_t seq_length = 0;           ///< S
  std::int64_t vocab_size = 0;           ///< V
  std::uint64_t seed = 0;                ///< of `randomized`
  std::vector<std::int64_t> full_stops;  ///< [V], "." characters in each piece; `sentence-length` only
};

/// The permutation that puts blocks (S ids each, as packed) into the named order: element i is the packed index of the
/// i-th block. Ties keep the packed order.
///   sentence-length  descending number of "." characters
///   unigram          ascending mean log2 probability of the block's tokens, add-one smoothed over all blocks
///   fragment         descending number of separators
[[nodiscard]] std::vector<std::uint64_t> order_blocks(const std::string& name, const IdVector& ids,
                                                      const BlockOrderContext& context);

}  // namespace cram
