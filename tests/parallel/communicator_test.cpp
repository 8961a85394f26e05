// The conformance suite on the backends that need one process: this process alone, and threads.
#include "parallel/communicator_suite.h"
#include "support/thread_ranks.h"

namespace cram::test {
namespace {

TEST(SelfCommunicator, PassesTheSuite) {
  for (const SuiteRow& row : kSuite) {
    const std::unique_ptr<Communicator> self = make_self_communicator();
    EXPECT_NO_THROW(row.check(*self)) << row.name;
  }
}

class Threads : public testing::TestWithParam<int> {};

TEST_P(Threads, PassTheSuite) {
  for (const SuiteRow& row : kSuite) {
    const std::vector<std::string> messages = run_ranks(GetParam(), row.check);
    for (std::size_t r = 0; r < messages.size(); ++r) EXPECT_EQ(messages[r], "") << row.name << ", rank " << r;
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, Threads, testing::Values(1, 2, 3, 4, 5, 8));

// Negative controls: a group in which one rank does something else must not pass.
TEST(Threads, OneWrongContributionIsSeenByAll) {
  for (const std::string& message : run_ranks(3, [](Communicator& c) {
         const at::Tensor sum = numbered(5, c.rank() == 1 ? 2 : c.rank(), at::kFloat);
         c.all_reduce_(sum);
         require_equal(sum, sum_over_ranks(5, c.size(), at::kFloat), "wrong sum");
       })) {
    EXPECT_EQ(message, "wrong sum");
  }
}

TEST(Threads, ARankThatThrowsEndsTheOthers) {
  const std::vector<std::string> messages = run_ranks(4, [](Communicator& c) {
    if (c.rank() == 2) throw std::runtime_error("rank 2 gives up");
    c.all_reduce_(at::ones({8}));
  });
  for (std::size_t r = 0; r < messages.size(); ++r) {
    EXPECT_NE(messages[r].find(r == 2 ? "gives up" : "left the group"), std::string::npos) << messages[r];
  }
}

TEST(Threads, AReceiverThatLeavesEndsItsSender) {
  const std::vector<std::string> messages = run_ranks(2, [](Communicator& c) {
    if (c.rank() == 1) throw std::runtime_error("no receiver");
    c.send(at::ones({3}), 1);
  });
  EXPECT_NE(messages[0].find("left the group"), std::string::npos) << messages[0];
}

TEST(Threads, MismatchedMessageSizesAreNamed) {
  const std::vector<std::string> messages = run_ranks(2, [](Communicator& c) {
    if (c.rank() == 0) c.send(at::ones({3}), 1);
    if (c.rank() == 1) c.recv_(at::ones({4}), 0);
  });
  EXPECT_NE(messages[1].find("4 elements"), std::string::npos) << messages[1];
}

}  // namespace
}  // namespace cram::test
