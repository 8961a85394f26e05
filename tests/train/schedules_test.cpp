// Learning-rate shapes and the batch ramp against values from exact arithmetic.
#include "train/schedules.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>

#include "support/expect_error.h"
#include "train/train_config.h"

namespace cram {
namespace {

using test::expect_error;

std::ifstream golden(const std::string& name) {
  std::ifstream file(concat(CRAM_SOURCE_DIR, "/tests/reference/golden/", name));
  EXPECT_TRUE(file.good()) << name;
  return file;
}

TEST(Schedules, AgreeWithTheGoldenFile) {
  std::ifstream file = golden("schedules.txt");
  std::map<std::string, int> seen;
  std::string line;
  while (std::getline(file, line)) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream words(line);
    ScheduleSettings settings;
    double t = -1, expected = -1;
    ASSERT_TRUE(words >> settings.shape >> settings.warmup >> settings.peak_fraction >> t >> expected) << line;
    // A few roundings of numbers of about one.
    EXPECT_NEAR(schedule_factor(settings, t), expected, 4 * std::numeric_limits<double>::epsilon()) << line;
    ++seen[settings.shape];
  }
  for (const std::string& name : schedule_names()) EXPECT_GT(seen[name], 10) << name << " has no golden values";
  EXPECT_EQ(seen.size(), schedule_names().size());
}

TEST(Schedules, TheRecipesTriangle) {
  const ScheduleSettings settings;  // triangle2
  EXPECT_EQ(schedule_factor(settings, 0), 0.25);
  EXPECT_EQ(schedule_factor(settings, 0.75), 1);
  EXPECT_EQ(schedule_factor(settings, 0.875), 0.5);
  EXPECT_EQ(schedule_factor(settings, 1), 0);
}

TEST(Schedules, AreNeverNegativeOrAboveOneOrLost) {
  for (const std::string& name : schedule_names()) {
    for (const double warmup : {0.0, 0.1, 0.9}) {
      if (name == "inverse-sqrt" && warmup == 0) continue;
      for (int i = 0; i <= 300; ++i) {
        const double factor = schedule_factor({name, warmup, 0.25}, i / 200.0);
        EXPECT_TRUE(factor >= 0 && factor <= 1) << name << " " << i / 200.0 << ": " << factor;
      }
    }
  }
}

TEST(Schedules, BeyondTheBudgetEqualTheirEnd) {
  for (const std::string& name : schedule_names()) {
    EXPECT_EQ(schedule_factor({name, 0.1, 0.25}, 1.5), schedule_factor({name, 0.1, 0.25}, 1)) << name;
  }
}

TEST(Schedules, UnknownShapesNameTheNearest) {
  expect_error(ExitCode::kUsage, {"kosine", "cosine"}, [] { (void)schedule_factor({"kosine", 0, 0}, 0.5); });
}

TEST(Schedules, InverseSqrtWithoutWarmUpIsRefused) {
  // sqrt(0/t) would train with a learning rate of zero.
  Config config;
  config.train.schedule = "inverse-sqrt";
  expect_error(ExitCode::kUsage, {"inverse-sqrt", "train.warmup"},
               [&] { (void)resolve_train_config(config, Layout{}); });
  config.train.warmup = 0.05;
  EXPECT_NO_THROW((void)resolve_train_config(config, Layout{}));
}

TEST(BatchRamp, AgreesWithTheGoldenFile) {
  std::ifstream file = golden("batch_ramp.txt");
  int rows = 0;
  std::string line;
  while (std::getline(file, line)) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream words(line);
    double ramp = -1, t = -1;
    std::int64_t batch = 0, quantum = 0, expected = 0;
    ASSERT_TRUE(words >> ramp >> batch >> quantum >> t >> expected) << line;
    EXPECT_EQ(ramped_batch_size(batch, quantum, ramp, t), expected) << line;
    ++rows;
  }
  EXPECT_GT(rows, 100);
}

TEST(BatchRamp, GrowsByQuantaToTheWholeBatch) {
  std::int64_t last = 0;
  for (int i = 0; i <= 10'000; ++i) {
    const std::int64_t rows = ramped_batch_size(8192, 128, 0.6, i / 10'000.0);
    EXPECT_GE(rows, last);
    EXPECT_LE(rows - last, 128);
    EXPECT_EQ(rows % 128, 0);
    last = rows;
  }
  EXPECT_EQ(last, 8192);
  EXPECT_EQ(ramped_batch_size(8192, 128, 0.6, 0), 128);
}

TEST(TrainConfig, DefaultsAreTheRecipeAndResolve) {
  Config config;
  config = resolve_train_config(config, Layout{});
  EXPECT_EQ(config.train.clock, "wall");
  EXPECT_EQ(config.train.batch_quantum, 128);
  Config off;
  off.train.batch_ramp = 0;
  off = resolve_train_config(off, Layout{});
  EXPECT_EQ(off.train.batch_quantum, off.train.batch_size);
}

TEST(TrainConfig, BatchSizesThatDoNotFitNameTheNearest) {
  Config config;
  config.train.batch_size = 8200;
  expect_error(ExitCode::kUsage, {"train.batch_size=8200", "8192 or 8320"},
               [&] { (void)resolve_train_config(config, Layout{}); });
  Config micro;
  micro.train.micro_batch_size = 100;
  expect_error(ExitCode::kUsage, {"train.micro_batch_size=100", "128"},
               [&] { (void)resolve_train_config(micro, Layout{}); });
  Config ranks;
  expect_error(ExitCode::kUsage, {"3 data ranks"}, [&] { (void)resolve_train_config(ranks, Layout{.data = 3}); });
  Config budget;
  budget.train.budget.value = 0;
  expect_error(ExitCode::kUsage, {"train.budget=0h", "positive"},
               [&] { (void)resolve_train_config(budget, Layout{}); });
}

}  // namespace
}  // namespace cram
