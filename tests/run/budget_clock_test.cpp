#include "run/budget_clock.h"

#include <gtest/gtest.h>

#include <fstream>
#include <thread>

#include "support/expect_error.h"
#include "support/temporary_folder.h"

namespace cram {
namespace {

using test::expect_error;
using test::TemporaryFolder;
using namespace std::chrono_literals;

Progress at_step(std::int64_t step, std::int64_t tokens = 0) {
  Progress progress;
  progress.step = step;
  progress.tokens = tokens;
  return progress;
}

// The progress of a run on this clock: rank 0 reads it once a step, the fraction follows from what it read.
Progress on(const BudgetClock& clock, std::int64_t step = 0) {
  Progress progress = at_step(step);
  progress.elapsed_s = clock.elapsed_s(progress);
  return progress;
}

std::string write_log(const TemporaryFolder& folder, const std::string& content) {
  std::ofstream(folder / "clock.log") << content;
  return "replay:" + (folder / "clock.log");
}

TEST(StepClock, CountsCompletedSteps) {
  const BudgetClock clock({20, "steps"}, "steps");
  EXPECT_EQ(clock.fraction(at_step(0)), 0);
  EXPECT_EQ(clock.fraction(at_step(10)), 0.5);
  EXPECT_EQ(clock.fraction(at_step(20)), 1);
  EXPECT_EQ(clock.fraction(at_step(30)), 1.5);
  EXPECT_TRUE(clock.covers_next_step(at_step(1000)));
}

TEST(TokenClock, CountsTokens) {
  const BudgetClock clock({4096, "tokens"}, "tokens");
  EXPECT_EQ(clock.fraction(at_step(7, 0)), 0);
  EXPECT_EQ(clock.fraction(at_step(1, 1024)), 0.25);
  EXPECT_EQ(clock.fraction(at_step(1, 8192)), 2);
}

TEST(VirtualClock, GivesEveryStepItsSeconds) {
  const BudgetClock clock({1, "m"}, "virtual:1.5");
  EXPECT_EQ(clock.elapsed_s(at_step(4)), 6);
  EXPECT_EQ(clock.fraction(on(clock, 4)), 0.1);
  EXPECT_EQ(clock.fraction(on(clock, 40)), 1);
  BudgetClock started({1, "m"}, "virtual:1.5");
  started.start(1000);  // the wall does not matter
  EXPECT_EQ(started.elapsed_s(at_step(4)), 6);
}

TEST(WallClock, GoesOnWhereItWasAndIsMonotone) {
  BudgetClock clock({100, "s"}, "wall");
  EXPECT_EQ(clock.elapsed_s({}), 0) << "not started";
  clock.start(50);
  double last = clock.elapsed_s({});
  EXPECT_GE(last, 50);
  EXPECT_LT(last, 60);
  for (int i = 0; i < 1000; ++i) {
    const double now = clock.elapsed_s({});
    EXPECT_GE(now, last);
    last = now;
  }
  std::this_thread::sleep_for(20ms);
  EXPECT_GE(clock.elapsed_s({}), last + 0.02);
  EXPECT_GT(clock.fraction(on(clock)), 0.5);
  // Only `elapsed_s` reads the clock: the same progress gives the same fraction for ever.
  const Progress read = on(clock);
  EXPECT_EQ(clock.fraction(read), read.elapsed_s / 100);
  std::this_thread::sleep_for(5ms);
  EXPECT_EQ(clock.fraction(read), read.elapsed_s / 100);
}

TEST(WallClock, PausesAreNotConsumed) {
  BudgetClock clock({100, "s"}, "wall");
  clock.start(10);
  clock.pause();
  const double paused_at = clock.elapsed_s({});
  std::this_thread::sleep_for(50ms);
  EXPECT_EQ(clock.elapsed_s({}), paused_at);
  const double paused_s = clock.resume();
  EXPECT_GE(paused_s, 0.05);
  const double resumed = clock.elapsed_s({});
  EXPECT_GE(resumed, paused_at);
  EXPECT_LT(resumed, paused_at + paused_s) << "the pause was counted";
  std::this_thread::sleep_for(20ms);
  EXPECT_GE(clock.elapsed_s({}), paused_at + 0.02) << "the clock stands after a pause";
}

TEST(WallClock, BudgetUnitsAreSeconds) {
  for (const auto& [value, unit, seconds] :
       {std::tuple{90.0, "s", 90.0}, {2.0, "m", 120.0}, {1.0, "h", 3600.0}, {0.5, "d", 43200.0}}) {
    BudgetClock clock({value, unit}, "wall");
    clock.start(seconds / 2);
    EXPECT_NEAR(clock.fraction(on(clock)), 0.5, 0.01) << unit;
  }
}

TEST(ReplayClock, ReadsTheFractionsBack) {
  const TemporaryFolder folder;
  const BudgetClock clock(
      {24, "h"}, write_log(folder, "# step fraction batch\n1 0 128\n2 0.10000000000000001 256\n\n3 0.5 512\n"));
  EXPECT_EQ(clock.fraction(at_step(0)), 0);
  EXPECT_EQ(clock.fraction(at_step(1)), 0.1);
  EXPECT_EQ(clock.fraction(at_step(2)), 0.5);
  EXPECT_TRUE(clock.covers_next_step(at_step(2)));
  EXPECT_FALSE(clock.covers_next_step(at_step(3)));
  EXPECT_EQ(clock.fraction(at_step(3)), 1) << "a log that ended ends the run";
}

TEST(ReplayClock, TheLastLineOfARedoneStepCounts) {
  const TemporaryFolder folder;
  const BudgetClock clock({5, "steps"}, write_log(folder, "1 0 8\n2 0.1 8\n3 0.2 8\n2 0.15 8\n3 0.25 8\n4 0.3 8\n"));
  EXPECT_EQ(clock.fraction(at_step(1)), 0.15);
  EXPECT_EQ(clock.fraction(at_step(2)), 0.25);
  EXPECT_EQ(clock.fraction(at_step(3)), 0.3);
}

TEST(ReplayClock, BadLogsAreRefused) {
  const TemporaryFolder folder;
  for (const char* content : {"", "# nothing\n", "2 0.1 8\n", "1 0 8\n3 0.2 8\n", "1 x 8\n", "1\n", "x 0 8\n",
                              "0 0 8\n", "-1 0 8\n", "1.5 0 8\n", "1 nan 8\n", "1 0\n", "1 0 x\n", "1 -0.1 8\n",
                              "1 1 8\n", "1 0 8 9\n", "1 0 8\n2 0.5 8\n3 0.4 8\n"}) {
    const std::string clock = write_log(folder, content);
    expect_error(
        ExitCode::kUsage, {"clock.log"},
        [&] {
          BudgetClock({24, "h"}, clock);
        },
        content);
  }
  expect_error(ExitCode::kUsage, {"missing.log"}, [&] {
    BudgetClock({24, "h"}, "replay:" + (folder / "missing.log"));
  });
}

TEST(CheckClock, RefusesUnknownClocksAndUnitsTheyCannotConsume) {
  struct Case {
    Quantity budget;
    const char* clock;
    const char* word;
  };
  const Case cases[] = {
      {{24, "h"}, "sundial", "auto, wall, steps, tokens, virtual:S, replay:FILE"},
      {{24, "h"}, "", "not one of"},
      {{24, "h"}, "virtual", "not one of"},
      {{24, "h"}, "steps", "in steps"},
      {{24, "h"}, "tokens", "in tokens"},
      {{9, "steps"}, "tokens", "9steps"},
      {{9, "tokens"}, "steps", "9tokens"},
      {{9, "steps"}, "wall", "as a time"},
      {{9, "tokens"}, "virtual:1", "as a time"},
      {{24, "h"}, "virtual:", "train.clock"},
      {{24, "h"}, "virtual:x", "train.clock"},
      {{24, "h"}, "virtual:0", "positive"},
      {{24, "h"}, "virtual:-1", "positive"},
      {{24, "h"}, "virtual:nan", "train.clock"},
  };
  for (const Case& c : cases) {
    expect_error(
        ExitCode::kUsage, {c.word}, [&] { check_clock(c.budget, c.clock); }, c.clock);
    expect_error(
        ExitCode::kUsage, {c.word}, [&] { BudgetClock(c.budget, c.clock); }, c.clock);
  }
  for (const char* clock : {"wall", "virtual:0.5"}) EXPECT_NO_THROW(check_clock({24, "h"}, clock));
}

}  // namespace
}  // namespace cram
