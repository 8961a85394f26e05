// Counter-based random numbers (Philox4x32-10, Salmon et al., SC 2011): a value is a pure function of (key, counter),
// so masks, initial weights and orders do not depend on layout, thread count or time.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

namespace cram {

/// One block of Philox4x32-10: 128 random bits for a 64-bit key and a 128-bit counter.
[[nodiscard]] std::array<std::uint32_t, 4> philox(std::uint64_t key, std::uint64_t counter_low,
                                                  std::uint64_t counter_high = 0) noexcept;

/// The key of a named stream: mixes the run's seed with a name and up to two numbers ("mask", epoch, row).
[[nodiscard]] std::uint64_t stream_key(std::uint64_t seed, std::string_view name, std::uint64_t a = 0,
                                       std::uint64_t b = 0) noexcept;

/// A sequential reader of one stream. Cheap to make: make one per row, per parameter, per epoch.
class RandomStream {
 public:
  explicit RandomStream(std::uint64_t key) noexcept : key_(key) {}
  [[nodiscard]] std::uint32_t next_u32() noexcept;
  [[nodiscard]] std::uint64_t next_u64() noexcept;
  /// Uniform in [0, bound), without modulo bias (Lemire's rejection); bound > 0.
  [[nodiscard]] std::uint64_t below(std::uint64_t bound) noexcept;
  /// Uniform in [0, 1) with 53 bits.
  [[nodiscard]] double uniform() noexcept;

 private:
  std::uint64_t key_;
  std::uint64_t counter_ = 0;
  std::array<std::uint32_t, 4> block_{};
  unsigned used_ = 4;
};

/// A permutation of 0..n-1 (Fisher-Yates) that depends on the key alone.
[[nodiscard]] std::vector<std::uint64_t> random_permutation(std::uint64_t n, std::uint64_t key);

/// Element `index` of a stream of standard normal values (Box-Muller; four elements a Philox block).
/// Random access: a slice of a tensor is filled without its other elements.
void fill_normal(std::uint64_t key, std::uint64_t first_index, double mean, double stddev, double* out,
                 std::uint64_t count) noexcept;

}  // namespace cram
