// A rank that waits for nothing is told so: what it waits for, and who else is stuck.
#include "parallel/watchdog.h"

#include <atomic>

#include "parallel/communicator_suite.h"
#include "support/run_program.h"
#include "support/thread_ranks.h"

namespace cram::test {
namespace {

using std::chrono::milliseconds;

// Reports of the ranks of a group in which `absent` does not take part in an all-reduce.
std::vector<std::string> reports_without(int size, int absent, const std::string& folder,
                                         const std::function<void(PendingOperations&)>& prepare, double timeout_s) {
  std::vector<std::string> reports(static_cast<std::size_t>(size));
  std::atomic<int> reported{0};
  (void)run_ranks(size, [&](Communicator& world) {
    prepare(world.pending());
    WatchdogSettings settings;
    settings.rank = world.rank();
    settings.world_size = size;
    settings.timeout_s = timeout_s;
    settings.quiet_timeout_s = 60;
    settings.give_up = [&, rank = static_cast<std::size_t>(world.rank())](const std::string& report) {
      reports[rank] = report;
      ++reported;
    };
    Watchdog watchdog(world.shared_pending(), settings);
    watchdog.call_roll_in(folder);
    if (world.rank() != absent) {
      world.all_reduce_(at::ones({123}));
      return;
    }
    for (int i = 0; i < 100 && reported < size - 1; ++i) std::this_thread::sleep_for(milliseconds(50));
    world.all_reduce_(at::ones({123}));  // late, so that the test ends
  });
  return reports;
}

TEST(Watchdog, EverySurvivorNamesOperationStepGroupAndTheMissingRank) {
  const TemporaryFolder folder;
  const std::vector<std::string> reports = reports_without(
      3, 1, folder.path(),
      [](PendingOperations& pending) {
        pending.set_phase(PendingOperations::Phase::kTraining);
        pending.set_step(17);
        pending.set_micro_batch(2);
      },
      0.3);
  EXPECT_EQ(reports[1], "");
  for (const std::size_t rank : {0U, 2U}) {
    for (const std::string& part :
         {std::string("step 17, micro-batch 2, training"),
          std::string("all_reduce of 123 x Float, number 0 of group world"), "rank " + std::to_string(rank) + " of 3",
          std::string("every rank but 1 has reported being stuck")}) {
      EXPECT_NE(reports[rank].find(part), std::string::npos) << reports[rank];
    }
  }
}

TEST(Watchdog, WaitsLongerWhereOneRankMayWorkAloneAndWhereStepsAreSlow) {
  const auto quiet = [](PendingOperations::Phase phase) {
    return [phase](PendingOperations& pending) { pending.set_phase(phase); };
  };
  using Phase = PendingOperations::Phase;
  // Five seconds of waiting in these phases are no reason to report.
  for (const Phase phase : {Phase::kStarting, Phase::kSaving, Phase::kEvaluating}) {
    EXPECT_EQ(reports_without(2, 1, "", quiet(phase), 0.2), std::vector<std::string>(2));
  }
  EXPECT_EQ(reports_without(
                2, 1, "",
                [](PendingOperations& pending) {
                  pending.set_phase(Phase::kTraining);
                  for (const double seconds : {0.1, 60.0, 61.0, 62.0}) pending.step_finished(seconds);
                },
                0.2),
            std::vector<std::string>(2));
}

// The missing rank comes while the others call the roll: training goes on.
TEST(Watchdog, LetsARankGoOnThatIsAnsweredAfterAll) {
  std::atomic<int> gave_up{0};
  const auto messages = run_ranks(2, [&](Communicator& world) {
    world.pending().set_phase(PendingOperations::Phase::kTraining);
    WatchdogSettings settings;
    settings.timeout_s = 0.4;
    settings.give_up = [&](const std::string&) { ++gave_up; };
    const Watchdog watchdog(world.shared_pending(), settings);
    if (world.rank() == 1) std::this_thread::sleep_for(milliseconds(1000));
    world.barrier();
    std::this_thread::sleep_for(milliseconds(1500));  // nothing pending
  });
  EXPECT_EQ(messages, std::vector<std::string>(2));
  EXPECT_EQ(gave_up, 0);
}

TEST(Watchdog, SaysWhatItWaitsForWhenTheJobIsBeingEnded) {
  std::atomic<bool> asked{false};
  (void)run_ranks(2, [&](Communicator& world) {
    WatchdogSettings settings;
    settings.ending = [&] {
      asked = true;
      return true;
    };
    const Watchdog watchdog(world.shared_pending(), settings);
    if (world.rank() == 1) std::this_thread::sleep_for(milliseconds(600));
    world.barrier();
  });
  EXPECT_TRUE(asked);
}

TEST(PendingOperations, NameTheOutermostAndForgetWhatIsOver) {
  PendingOperations pending;
  EXPECT_FALSE(pending.now().any);
  const std::string group = "data";
  {
    const PendingOperations::Scope outer(pending, {"send", &group, 1, 4, 3, at::kDouble, 10, 7});
    const PendingOperations::Scope inner(pending, {"barrier", &group});
    EXPECT_TRUE(pending.now().any);
    EXPECT_NE(pending.now().text.find("send with rank 3 of 10 x Double, number 7 of group data (rank 1 of 4)"),
              std::string::npos)
        << pending.now().text;
  }
  EXPECT_FALSE(pending.now().any);
}

}  // namespace
}  // namespace cram::test
