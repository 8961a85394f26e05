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

TEST_P(Threads, PassTheSuiteStaged) {
  for (const SuiteRow& row : kSuite) {
    const std::vector<std::string> messages = run_ranks(
        GetParam(), [&](Communicator& c) { row.check(*make_staged_communicator(c.split(0, c.rank(), c.name()))); });
    for (std::size_t r = 0; r < messages.size(); ++r) EXPECT_EQ(messages[r], "") << row.name << ", rank " << r;
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, Threads, testing::Values(1, 2, 3, 4, 5, 8));

TEST(StagedCommunicator, PassesTheSuiteAlone) {
  for (const SuiteRow& row : kSuite) {
    const std::unique_ptr<Communicator> staged = make_staged_communicator(make_self_communicator());
    EXPECT_NO_THROW(row.check(*staged)) << row.name;
  }
}

// Rank 0 of 2 that is told what to do: all_reduce doubles, when it is waited for.
class ToldCommunicator final : public Communicator {
 public:
  ToldCommunicator() : Communicator(0, 2, "told") {}
  std::vector<at::Tensor> given;
  bool over = false;

 protected:
  class Doubling final : public Work::Pending {
   public:
    Doubling(const at::Tensor& tensor, const bool& over) : tensor_(tensor), over_(over) {}
    void wait() override { tensor_.mul_(2); }
    bool done() override { return over_; }

   private:
    at::Tensor tensor_;
    const bool& over_;
  };

  Work start_all_reduce(const at::Tensor& tensor, ReduceOp) override {
    given.push_back(tensor);
    return Work(std::make_unique<Doubling>(tensor, over));
  }
  Work start_all_gather(const at::Tensor&, const at::Tensor&) override { return Work(); }
  Work start_reduce_scatter(const at::Tensor&, const at::Tensor&, ReduceOp) override { return Work(); }
  void do_broadcast(const at::Tensor&, int) override {}
  Work start_exchange(const std::vector<Message>&, const std::vector<Message>&) override { return Work(); }
  void do_barrier() override {}
  std::unique_ptr<Communicator> do_split(int, int, const std::string&) override {
    return std::make_unique<ToldCommunicator>();
  }
  void check_tensor(const at::Tensor& tensor) const override {
    CRAM_CHECK(tensor.scalar_type() != at::kHalf, ExitCode::kUsage, "told: no halves");
  }
};

class Staged : public testing::Test {
 protected:
  Staged() {
    auto inner = std::make_unique<ToldCommunicator>();
    told_ = inner.get();
    staged_ = make_staged_communicator(std::move(inner));
  }
  [[nodiscard]] const void* address(std::size_t operation) const { return told_->given.at(operation).const_data_ptr(); }
  ToldCommunicator* told_;
  std::unique_ptr<Communicator> staged_;
};

TEST_F(Staged, GoesThroughCopiesThatComeBackWhenWaitedFor) {
  const at::Tensor tensor = full({2, 3}, 4);
  Work work = staged_->all_reduce_async_(tensor);
  EXPECT_NE(address(0), tensor.const_data_ptr());
  EXPECT_FALSE(work.done());
  told_->over = true;
  EXPECT_TRUE(work.done());
  EXPECT_TRUE(at::equal(tensor, full({2, 3}, 4)));
  work.wait();
  EXPECT_TRUE(at::equal(tensor, full({2, 3}, 8)));
}

TEST_F(Staged, KeepsItsHostBuffers) {
  Work first = staged_->all_reduce_async_(ones({100}));
  Work second = staged_->all_reduce_async_(ones({10}, at::kDouble));
  EXPECT_NE(address(0), address(1));
  first.wait();
  second.wait();
  staged_->all_reduce_(ones({9}, at::kDouble));
  EXPECT_EQ(address(2), address(1)) << "the smallest that is large enough";
  staged_->all_reduce_(ones({200}, at::kBFloat16));
  EXPECT_EQ(address(3), address(0)) << "of another type";
}

TEST_F(Staged, CountsEachOperationOnceAndSharesTheMonitor) {
  staged_->all_reduce_(ones({100}));
  EXPECT_EQ(staged_->trace().operations(), 1);
  EXPECT_EQ(staged_->trace().bytes().at("all_reduce"), 400);
  EXPECT_EQ(&staged_->pending(), &told_->pending());
  EXPECT_EQ(&staged_->split(0, 0, "part")->pending(), &told_->pending());
}

TEST_F(Staged, TheInnerOneStillRefusesTypes) {
  EXPECT_THROW(staged_->all_reduce_(ones({1}, at::kHalf)), Error);
  EXPECT_TRUE(told_->given.empty());
}

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
