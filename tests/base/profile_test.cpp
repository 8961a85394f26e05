#include "base/profile.h"

#include <gtest/gtest.h>

namespace cram {
namespace {

int settled = 0;

TEST(Profile, ListensForItsLifetimeAndSettlesBeforeEveryLookAtTheClock) {
  settled = 0;
  { const Timed nobody_listens(Section::kGemm); }
  EXPECT_EQ(settled, 0);
  Profile profile([] { ++settled; });
  {
    const Timed outer(Section::kLoss);
    const Timed inner(Section::kGemm);
  }
  EXPECT_EQ(settled, 4);
  EXPECT_GT(profile.seconds(Section::kLoss), 0);
  EXPECT_GT(profile.seconds(Section::kGemm), 0);
  {
    const Profile newer;
    const Timed timed(Section::kNorm);
  }
  EXPECT_EQ(settled, 4);
  EXPECT_EQ(profile.seconds(Section::kNorm), 0);
}

}  // namespace
}  // namespace cram
