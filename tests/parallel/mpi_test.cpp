// The conformance suite under mpirun; the number of ranks is fixed in CMake. Any rank's failure fails the test on rank
// 0, whose output ctest reads, and a rank that throws ends the job.
#include "parallel/communicator_suite.h"
#include "parallel/mpi_environment.h"

namespace cram::test {
namespace {

Communicator* g_world = nullptr;  // gtest offers its tests no other way to the main function's objects

// Largest over the ranks, so that everybody agrees whether the test failed.
bool failed_anywhere(bool failed_here) {
  const at::Tensor flag = at::full({1}, failed_here ? 1 : 0, at::kLong);
  g_world->all_reduce_(flag, ReduceOp::kMax);
  return flag.item<std::int64_t>() != 0;
}

class Mpi : public testing::TestWithParam<SuiteRow> {};

void expect_passed(const SuiteRow& row, Communicator& group) {
  std::string message;
  try {
    row.check(group);
  } catch (const std::exception& error) {
    message = error.what();
  }
  EXPECT_EQ(message, "") << "rank " << g_world->rank();
  const bool anywhere = failed_anywhere(!message.empty());
  EXPECT_TRUE(!anywhere || !message.empty()) << "another rank failed";
}

TEST_P(Mpi, PassesTheSuite) { expect_passed(GetParam(), *g_world); }

TEST_P(Mpi, PassesTheSuiteStaged) {
  const std::unique_ptr<Communicator> staged =
      make_staged_communicator(g_world->split(0, g_world->rank(), g_world->name()));
  expect_passed(GetParam(), *staged);
}

INSTANTIATE_TEST_SUITE_P(Suite, Mpi, testing::ValuesIn(kSuite),
                         [](const auto& parameter) { return std::string(parameter.param.name); });

TEST(MpiWorld, HasTheSizeThatWasAskedFor) {
  const char* expected = std::getenv("CRAM_TEST_RANKS");
  ASSERT_NE(expected, nullptr);
  EXPECT_EQ(std::to_string(g_world->size()), expected);
}

// Negative control of the reduction: one rank contributes something else, every rank must see it.
TEST(MpiWorld, OneWrongContributionIsSeenByAll) {
  const at::Tensor sum = numbered(5, g_world->rank() == 0 ? 6 : g_world->rank(), at::kFloat);
  g_world->all_reduce_(sum);
  EXPECT_FALSE(at::equal(sum, sum_over_ranks(5, g_world->size(), at::kFloat)));
}

}  // namespace
}  // namespace cram::test

int main(int argc, char** argv) {
  const cram::Launch launch = cram::detect_launch();
  if (launch.launcher == "none") {
    std::fputs("this test runs under mpirun\n", stderr);
    return 1;
  }
  const cram::MpiEnvironment environment(launch, &argc, &argv);
  testing::InitGoogleTest(&argc, argv);
  int result = 1;
  {
    const std::unique_ptr<cram::Communicator> world = cram::make_mpi_communicator();
    cram::test::g_world = world.get();
    if (world->rank() != 0) {
      delete testing::UnitTest::GetInstance()->listeners().Release(
          testing::UnitTest::GetInstance()->listeners().default_result_printer());
    }
    result = RUN_ALL_TESTS();
    if (cram::test::failed_anywhere(result != 0) && result == 0) {
      std::fprintf(stderr, "rank %d passed, another failed\n", world->rank());
      result = 1;
    }
  }
  return result;
}
