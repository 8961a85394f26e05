#include "data/masking.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/rng.h"
#include "base/special_tokens.h"

namespace cram {
namespace {

/// round(numerator / denominator), halves to even, without the rounding errors of 0.8 and 0.9 in binary.
std::int64_t round_ratio(std::int64_t numerator, std::int64_t denominator) {
  const std::int64_t quotient = numerator / denominator;
  const std::int64_t twice_rest = 2 * (numerator % denominator);
  const bool up = twice_rest > denominator || (twice_rest == denominator && quotient % 2 == 1);
  return quotient + (up ? 1 : 0);
}

}  // namespace

std::int64_t masked_per_row(const MaskSettings& settings) {
  return static_cast<std::int64_t>(std::nearbyint(settings.mask_rate * static_cast<double>(settings.seq_length)));
}

void mask_row(const MaskSettings& settings, std::int64_t epoch, std::int64_t row, std::uint32_t* ids,
              std::int64_t* positions, std::int64_t* labels) {
  const std::int64_t n = masked_per_row(settings);
  CRAM_CHECK(settings.vocab_size > kSpecialTokens && n >= 0 && n <= settings.seq_length, ExitCode::kUsage,
             "masking needs a vocabulary of more than ", kSpecialTokens, " entries and a mask rate in [0,1], got ",
             settings.vocab_size, " and ", settings.mask_rate);
  RandomStream stream(
      stream_key(settings.seed, "mask", static_cast<std::uint64_t>(epoch), static_cast<std::uint64_t>(row)));

  // The first n steps of a Fisher-Yates shuffle: n distinct positions, already in random slot order.
  std::vector<std::int64_t> slots(static_cast<std::size_t>(settings.seq_length));
  std::iota(slots.begin(), slots.end(), std::int64_t{0});
  const auto chosen = static_cast<std::size_t>(n);
  for (std::size_t i = 0; i < chosen; ++i) std::swap(slots[i], slots[i + stream.below(slots.size() - i)]);

  std::copy_n(slots.begin(), chosen, positions);
  std::sort(positions, positions + n);
  for (std::int64_t i = 0; i < n; ++i) labels[i] = static_cast<std::int64_t>(ids[positions[i]]);

  const auto mask_end = static_cast<std::size_t>(round_ratio(8 * n, 10));
  const auto random_end = static_cast<std::size_t>(round_ratio(9 * n, 10));
  for (std::size_t i = 0; i < mask_end; ++i) ids[slots[i]] = kMaskId;
  const auto ordinary = static_cast<std::uint64_t>(settings.vocab_size) - kSpecialTokens;
  for (std::size_t i = mask_end; i < random_end; ++i) {
    ids[slots[i]] = kSpecialTokens + static_cast<std::uint32_t>(stream.below(ordinary));
  }
}

}  // namespace cram
