#include "base/rng.h"

#include <cmath>
#include <numbers>
#include <numeric>
#include <utility>

#include "base/digest.h"

namespace cram {
namespace {

constexpr std::uint32_t kMultiplier0 = 0xD2511F53U;
constexpr std::uint32_t kMultiplier1 = 0xCD9E8D57U;
constexpr std::uint32_t kWeyl0 = 0x9E3779B9U;
constexpr std::uint32_t kWeyl1 = 0xBB67AE85U;

std::uint32_t high(std::uint64_t value) noexcept { return static_cast<std::uint32_t>(value >> 32); }
std::uint32_t low(std::uint64_t value) noexcept { return static_cast<std::uint32_t>(value); }

// (0, 1]: the logarithm below needs a positive argument.
double open_unit(std::uint32_t bits) noexcept { return (static_cast<double>(bits) + 1.0) * 0x1p-32; }

}  // namespace

std::array<std::uint32_t, 4> philox(std::uint64_t key, std::uint64_t counter_low, std::uint64_t counter_high) noexcept {
  std::array<std::uint32_t, 4> c{low(counter_low), high(counter_low), low(counter_high), high(counter_high)};
  std::uint32_t key0 = low(key);
  std::uint32_t key1 = high(key);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t product0 = std::uint64_t{kMultiplier0} * c[0];
    const std::uint64_t product1 = std::uint64_t{kMultiplier1} * c[2];
    c = {high(product1) ^ c[1] ^ key0, low(product1), high(product0) ^ c[3] ^ key1, low(product0)};
    key0 += kWeyl0;
    key1 += kWeyl1;
  }
  return c;
}

std::uint64_t stream_key(std::uint64_t seed, std::string_view name, std::uint64_t a, std::uint64_t b) noexcept {
  const std::array<std::uint32_t, 4> mixed = philox(hash64(name, seed), a, b);
  return std::uint64_t{mixed[1]} << 32 | mixed[0];
}

std::uint32_t RandomStream::next_u32() noexcept {
  if (used_ == 4) {
    block_ = philox(key_, counter_++);
    used_ = 0;
  }
  return block_[used_++];
}

std::uint64_t RandomStream::next_u64() noexcept {
  const std::uint64_t upper = next_u32();
  return upper << 32 | next_u32();
}

std::uint64_t RandomStream::below(std::uint64_t bound) noexcept {
  // 64x64 -> 128 multiply; reject the few values that would make the first results more likely.
  const std::uint64_t threshold = (0 - bound) % bound;
  while (true) {
    const unsigned __int128 product = static_cast<unsigned __int128>(next_u64()) * bound;
    if (static_cast<std::uint64_t>(product) >= threshold) return static_cast<std::uint64_t>(product >> 64);
  }
}

double RandomStream::uniform() noexcept { return static_cast<double>(next_u64() >> 11) * 0x1p-53; }

std::vector<std::uint64_t> random_permutation(std::uint64_t n, std::uint64_t key) {
  std::vector<std::uint64_t> order(n);
  std::iota(order.begin(), order.end(), std::uint64_t{0});
  RandomStream stream(key);
  for (std::uint64_t i = n; i > 1; --i) std::swap(order[i - 1], order[stream.below(i)]);
  return order;
}

void fill_normal(std::uint64_t key, std::uint64_t first_index, double mean, double stddev, double* out,
                 std::uint64_t count) noexcept {
  // One block holds four values: two Box-Muller pairs.
  std::uint64_t index = first_index;
  std::uint64_t written = 0;
  while (written < count) {
    const std::array<std::uint32_t, 4> bits = philox(key, index / 4);
    double values[4];
    for (std::size_t pair = 0; pair < 2; ++pair) {
      const double radius = std::sqrt(-2.0 * std::log(open_unit(bits[2 * pair])));
      const double angle = 2.0 * std::numbers::pi * static_cast<double>(bits[2 * pair + 1]) * 0x1p-32;
      values[2 * pair] = radius * std::cos(angle);
      values[2 * pair + 1] = radius * std::sin(angle);
    }
    for (std::uint64_t lane = index % 4; lane < 4 && written < count; ++lane, ++index, ++written) {
      out[written] = mean + stddev * values[lane];
    }
  }
}

}  // namespace cram
