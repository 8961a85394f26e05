// Masked-language-model corruption of one row: a pure function of (seed, epoch, global row id), so masks do not depend
// on layout, batch size, prefetching or the order of calls. Legend: S tokens a row, n masked positions a row.
#pragma once

#include <cstdint>

namespace cram {

struct MaskSettings {
  std::uint64_t seed = 0;
  std::int64_t vocab_size = 0;  ///< V > 5
  std::int64_t seq_length = 0;  ///< S
  double mask_rate = 0.25;
};

/// n = round(mask_rate * S), halves to even.
[[nodiscard]] std::int64_t masked_per_row(const MaskSettings& settings);

/// Masks one row in place. `ids` [S]: original in, masked out. `positions` [n]: ascending within the row; `labels` [n]:
/// the original ids there. In random slot order the first round(.8n) become the mask id, up to round(.9n) a uniformly
/// random ordinary token, the rest stay. Every position may be chosen, the separator too; specials are never drawn.
void mask_row(const MaskSettings& settings, std::int64_t epoch, std::int64_t row, std::uint32_t* ids,
              std::int64_t* positions, std::int64_t* labels);

}  // namespace cram
