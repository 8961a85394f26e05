#include "base/rng.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

namespace cram {
namespace {

using Block = std::array<std::uint32_t, 4>;

TEST(Philox, KnownAnswersOfRandom123) {
  // kat_vectors of Random123, philox4x32 with 10 rounds: counter words, key words, result.
  EXPECT_EQ(philox(0, 0, 0), (Block{0x6627e8d5U, 0xe169c58dU, 0xbc57ac4cU, 0x9b00dbd8U}));
  EXPECT_EQ(philox(~std::uint64_t{0}, ~std::uint64_t{0}, ~std::uint64_t{0}),
            (Block{0x408f276dU, 0x41c83b0eU, 0xa20bc7c6U, 0x6d5451fdU}));
  // Digits of pi: counter 243f6a88 85a308d3 13198a2e 03707344, key a4093822 299f31d0.
  EXPECT_EQ(philox(0x299f31d0a4093822U, 0x85a308d3243f6a88U, 0x0370734413198a2eU),
            (Block{0xd16cfe09U, 0x94fdccebU, 0x5001e420U, 0x24126ea1U}));
}

TEST(StreamKey, DependsOnEveryPart) {
  std::set<std::uint64_t> keys;
  for (std::uint64_t seed : {0U, 1U, 2U}) {
    for (const char* name : {"", "mask", "masks", "encoder.layers.1", "encoder.layers.11"}) {
      for (std::uint64_t a : {0U, 1U, 7U}) {
        for (std::uint64_t b : {0U, 1U, 7U}) keys.insert(stream_key(seed, name, a, b));
      }
    }
  }
  EXPECT_EQ(keys.size(), 3U * 5 * 3 * 3);
}

TEST(RandomStream, ReadsTheBlocksInOrder) {
  RandomStream stream(0);
  EXPECT_EQ(stream.next_u32(), 0x6627e8d5U);
  EXPECT_EQ(stream.next_u32(), 0xe169c58dU);
  EXPECT_EQ(stream.next_u64(), 0xbc57ac4c9b00dbd8U);
  EXPECT_EQ(stream.next_u32(), philox(0, 1)[0]);
}

TEST(RandomStream, UniformStaysInTheUnitIntervalWithItsMoments) {
  RandomStream stream(17);
  constexpr int kCount = 200'000;
  double sum = 0, squares = 0;
  for (int i = 0; i < kCount; ++i) {
    const double value = stream.uniform();
    ASSERT_GE(value, 0.0);
    ASSERT_LT(value, 1.0);
    sum += value;
    squares += value * value;
  }
  // Six standard errors of the mean of a uniform value, sqrt(1/12/n), and of its square, sqrt(4/45/n).
  EXPECT_NEAR(sum / kCount, 0.5, 6 * std::sqrt(1.0 / 12 / kCount));
  EXPECT_NEAR(squares / kCount, 1.0 / 3, 6 * std::sqrt(4.0 / 45 / kCount));
}

TEST(RandomStream, BelowHitsEveryValueEquallyOften) {
  RandomStream stream(3);
  std::map<std::uint64_t, int> counts;
  constexpr int kCount = 70'000;
  for (int i = 0; i < kCount; ++i) ++counts[stream.below(7)];
  ASSERT_EQ(counts.size(), 7U);
  double chi_squared = 0;
  for (const auto& [value, count] : counts) {
    ASSERT_LT(value, 7U);
    chi_squared += (count - kCount / 7.0) * (count - kCount / 7.0) / (kCount / 7.0);
  }
  EXPECT_LT(chi_squared, 35);  // 6 degrees of freedom: p < 1e-5
  for (int i = 0; i < 100; ++i) EXPECT_EQ(stream.below(1), 0U);
  const std::uint64_t huge = (std::uint64_t{1} << 63) + 1;  // nearly half of the draws are rejected
  for (int i = 0; i < 100; ++i) EXPECT_LT(stream.below(huge), huge);
}

TEST(RandomPermutation, IsOneForEverySize) {
  for (const std::uint64_t n : {0U, 1U, 2U, 1000U}) {
    std::vector<std::uint64_t> order = random_permutation(n, 5);
    EXPECT_EQ(order, random_permutation(n, 5));
    EXPECT_EQ(order.size(), n);
    if (n == 1000) {
      EXPECT_NE(order, random_permutation(n, 6));
    }
    std::sort(order.begin(), order.end());
    for (std::uint64_t i = 0; i < n; ++i) ASSERT_EQ(order[i], i);
  }
}

TEST(RandomPermutation, EveryOrderOfThreeIsEquallyLikely) {
  std::map<std::vector<std::uint64_t>, int> counts;
  for (std::uint64_t key = 0; key < 6000; ++key) ++counts[random_permutation(3, key)];
  ASSERT_EQ(counts.size(), 6U);
  for (const auto& [order, count] : counts) EXPECT_NEAR(count, 1000, 6 * std::sqrt(1000.0));
}

TEST(FillNormal, ASliceEqualsTheSliceOfTheWhole) {
  std::vector<double> whole(103);
  fill_normal(9, 0, 0.5, 2, whole.data(), whole.size());
  for (std::uint64_t first = 0; first < 12; ++first) {
    for (std::uint64_t count = 0; first + count <= whole.size(); count += 7) {
      std::vector<double> slice(count + 1, -77);
      fill_normal(9, first, 0.5, 2, slice.data(), count);
      for (std::uint64_t i = 0; i < count; ++i) ASSERT_EQ(slice[i], whole[first + i]) << first << "+" << i;
      ASSERT_EQ(slice[count], -77) << "wrote beyond the end";
    }
  }
}

TEST(FillNormal, HasTheMomentsOfANormalDistribution) {
  constexpr std::size_t kCount = 400'000;
  std::vector<double> values(kCount);
  fill_normal(21, 0, 0, 1, values.data(), kCount);
  double m1 = 0, m2 = 0, m3 = 0, m4 = 0, lag = 0;
  std::size_t within = 0;
  for (std::size_t i = 0; i < kCount; ++i) {
    const double x = values[i];
    ASSERT_TRUE(std::isfinite(x));
    m1 += x;
    m2 += x * x;
    m3 += x * x * x;
    m4 += x * x * x * x;
    if (i > 0) lag += x * values[i - 1];
    within += std::abs(x) < 1 ? 1 : 0;
  }
  const double n = kCount;
  // Six standard errors: variances of x, x^2, x^3, x^4 are 1, 2, 15, 96.
  EXPECT_NEAR(m1 / n, 0, 6 / std::sqrt(n));
  EXPECT_NEAR(m2 / n, 1, 6 * std::sqrt(2 / n));
  EXPECT_NEAR(m3 / n, 0, 6 * std::sqrt(15 / n));
  EXPECT_NEAR(m4 / n, 3, 6 * std::sqrt(96 / n));
  EXPECT_NEAR(lag / n, 0, 6 / std::sqrt(n));
  EXPECT_NEAR(static_cast<double>(within) / n, 0.682689, 6 * std::sqrt(0.2166 / n));
}

// Golden values: a change here changes initial weights, masks and orders of every run and must not happen by accident.
TEST(Golden, StreamsStayWhatTheyAre) {
  EXPECT_EQ(stream_key(0, "mask", 1, 2), 15565355864625356753U);
  EXPECT_EQ(stream_key(42, "encoder.layers.3.attn.dense.weight"), 12438352104460462472U);
  EXPECT_EQ(random_permutation(8, 1), (std::vector<std::uint64_t>{3, 1, 5, 0, 2, 6, 4, 7}));
  double normal[3];
  fill_normal(stream_key(0, "x"), 5, 0, 1, normal, 3);
  // Logarithm and cosine may differ in the last digit between mathematics libraries.
  EXPECT_NEAR(normal[0], 1.8717954467957374, 1e-14);
  EXPECT_NEAR(normal[1], 1.759182591033648, 1e-14);
  EXPECT_NEAR(normal[2], 0.22870654521398104, 1e-14);
}

}  // namespace
}  // namespace cram
