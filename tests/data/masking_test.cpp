#include "data/masking.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "base/special_tokens.h"
#include "data_support.h"

namespace cram {
namespace {

struct Masked {
  std::vector<std::uint32_t> ids;
  std::vector<std::int64_t> positions;
  std::vector<std::int64_t> labels;
  bool operator==(const Masked&) const = default;
};

std::vector<std::uint32_t> original_row(std::int64_t seq_length) {
  std::vector<std::uint32_t> ids;
  for (std::int64_t i = 0; i < seq_length; ++i)
    ids.push_back(i % 16 == 15 ? kSepId : static_cast<std::uint32_t>(100 + i));
  return ids;
}

Masked mask(const MaskSettings& settings, std::int64_t epoch, std::int64_t row) {
  const auto n = static_cast<std::size_t>(masked_per_row(settings));
  Masked masked{original_row(settings.seq_length), std::vector<std::int64_t>(n), std::vector<std::int64_t>(n)};
  mask_row(settings, epoch, row, masked.ids.data(), masked.positions.data(), masked.labels.data());
  return masked;
}

constexpr MaskSettings kRecipe{7, 32768, 128, 0.25};

TEST(MaskingTest, CountsRoundHalvesToEven) {
  const auto count = [](double rate, std::int64_t seq_length) { return masked_per_row({0, 100, seq_length, rate}); };
  EXPECT_EQ(count(0.25, 128), 32);
  EXPECT_EQ(count(0.25, 10), 2);    // 2.5
  EXPECT_EQ(count(0.25, 14), 4);    // 3.5
  EXPECT_EQ(count(0.15, 128), 19);  // 19.2
  EXPECT_EQ(count(0.0, 128), 0);
  EXPECT_EQ(count(1.0, 128), 128);
}

TEST(MaskingTest, ExactShares) {
  for (std::int64_t row = 0; row < 200; ++row) {
    const Masked masked = mask(kRecipe, 0, row);
    const std::vector<std::uint32_t> original = original_row(128);
    std::int64_t mask_ids = 0;
    std::int64_t changed = 0;
    std::int64_t kept = 0;
    for (std::size_t i = 0; i < masked.positions.size(); ++i) {
      const auto at = static_cast<std::size_t>(masked.positions[i]);
      ASSERT_EQ(masked.labels[i], original[at]);
      mask_ids += masked.ids[at] == kMaskId ? 1 : 0;
      kept += masked.ids[at] == original[at] ? 1 : 0;
      changed += masked.ids[at] != kMaskId && masked.ids[at] != original[at] ? 1 : 0;
    }
    EXPECT_EQ(mask_ids, 26);
    EXPECT_EQ(changed + kept, 6);
    EXPECT_GE(kept, 3);  // a random token may be the original one by chance
    EXPECT_LE(kept, 4);
    EXPECT_TRUE(std::is_sorted(masked.positions.begin(), masked.positions.end()));
    EXPECT_EQ(std::set<std::int64_t>(masked.positions.begin(), masked.positions.end()).size(), 32U);
    for (std::size_t i = 0; i < 128; ++i) {
      if (!std::binary_search(masked.positions.begin(), masked.positions.end(), static_cast<std::int64_t>(i))) {
        ASSERT_EQ(masked.ids[i], original[i]) << "an unchosen position changed";
      }
    }
  }
}

TEST(MaskingTest, SharesOfSmallRows) {
  // n = 5: round(4) = 4 masked, round(4.5) = 4 -> none random, 1 kept; n = 15: 12, round(13.5) = 14 -> 2 random, 1
  // kept.
  for (const auto& [n, masked_count, unmasked_count] :
       std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>>{
           {5, 4, 1}, {15, 12, 3}, {1, 1, 0}, {2, 2, 0}}) {
    const MaskSettings settings{1, 30000, n, 1.0};
    const Masked masked = mask(settings, 3, 4);
    EXPECT_EQ(std::count(masked.ids.begin(), masked.ids.end(), kMaskId), masked_count) << n;
    EXPECT_EQ(n - masked_count, unmasked_count);
  }
}

TEST(MaskingTest, SpecialsAreNeverDrawnAndEveryOrdinaryTokenIs) {
  const MaskSettings settings{3, 9, 64, 1.0};  // ordinary tokens are 5..8
  std::set<std::uint32_t> drawn;
  for (std::int64_t row = 0; row < 100; ++row) {
    std::vector<std::uint32_t> ids(64, kSepId);
    std::vector<std::int64_t> positions(64);
    std::vector<std::int64_t> labels(64);
    mask_row(settings, 0, row, ids.data(), positions.data(), labels.data());
    for (const std::uint32_t id : ids) {
      if (id != kMaskId && id != kSepId) drawn.insert(id);
    }
  }
  EXPECT_EQ(drawn, (std::set<std::uint32_t>{5, 6, 7, 8}));
}

TEST(MaskingTest, SeparatorsMayBeChosen) {
  bool seen = false;
  for (std::int64_t row = 0; row < 20 && !seen; ++row) {
    const Masked masked = mask(kRecipe, 0, row);
    seen = std::find(masked.labels.begin(), masked.labels.end(), std::int64_t{kSepId}) != masked.labels.end();
  }
  EXPECT_TRUE(seen);
}

TEST(MaskingTest, IsAPureFunctionOfSeedEpochAndRow) {
  const Masked first = mask(kRecipe, 2, 1000);
  for (std::int64_t row = 0; row < 50; ++row) static_cast<void>(mask(kRecipe, 1, row));
  EXPECT_EQ(mask(kRecipe, 2, 1000), first);
  EXPECT_NE(mask(kRecipe, 3, 1000).positions, first.positions);
  EXPECT_NE(mask(kRecipe, 2, 1001).positions, first.positions);
  MaskSettings other = kRecipe;
  other.seed = 8;
  EXPECT_NE(mask(other, 2, 1000).positions, first.positions);
}

TEST(MaskingTest, PositionsDoNotDependOnTheTokens) {
  const Masked first = mask(kRecipe, 0, 5);
  std::vector<std::uint32_t> ids(128, 77);
  std::vector<std::int64_t> positions(32);
  std::vector<std::int64_t> labels(32);
  mask_row(kRecipe, 0, 5, ids.data(), positions.data(), labels.data());
  EXPECT_EQ(positions, first.positions);
}

TEST(MaskingTest, EveryPositionIsChosenAboutEquallyOften) {
  std::vector<int> chosen(128);
  constexpr int kRows = 4000;
  for (std::int64_t row = 0; row < kRows; ++row) {
    for (const std::int64_t position : mask(kRecipe, 0, row).positions) ++chosen[static_cast<std::size_t>(position)];
  }
  // Binomial(4000, 1/4): mean 1000, standard deviation 27; five of them.
  for (const int count : chosen) EXPECT_NEAR(count, 1000, 137);
}

// Recorded once: a source that depends on time, layout or machine changes these.
TEST(MaskingTest, GoldenRows) {
  const MaskSettings settings{42, 1000, 16, 0.5};
  const Masked a = mask(settings, 0, 0);
  const Masked b = mask(settings, 3, 123456789);
  EXPECT_EQ(a.positions, (std::vector<std::int64_t>{0, 2, 3, 9, 10, 11, 13, 14}));
  EXPECT_EQ(a.ids, (std::vector<std::uint32_t>{4, 101, 4, 4, 104, 105, 106, 107, 108, 109, 4, 4, 112, 4, 901, 3}));
  EXPECT_EQ(b.positions, (std::vector<std::int64_t>{1, 5, 6, 7, 9, 11, 12, 15}));
  EXPECT_EQ(b.ids, (std::vector<std::uint32_t>{100, 4, 102, 103, 104, 492, 4, 4, 108, 109, 110, 4, 4, 113, 114, 4}));
}

TEST(MaskingTest, ImpossibleSettingsAreRefused) {
  std::vector<std::uint32_t> ids(4);
  std::vector<std::int64_t> out(16);
  EXPECT_THROW(mask_row({0, 5, 4, 0.5}, 0, 0, ids.data(), out.data(), out.data()), Error);
  EXPECT_THROW(mask_row({0, 50, 4, 1.5}, 0, 0, ids.data(), out.data(), out.data()), Error);
}

}  // namespace
}  // namespace cram
