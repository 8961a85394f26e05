// Plans are proved before they run: no deadlock with rendezvous sends, every computation once and after its input, the
// memory bound, and exactly the bubble of the formulas.
#include "parallel/pipeline_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "support/expect_error.h"

namespace cram::test {
namespace {

constexpr int kMicroBatches[] = {1, 2, 3, 4, 5, 7, 8, 16, 32};

void expect_complete(const std::vector<StagePlan>& plans, const PlanShape& shape, const std::string& label) {
  for (std::size_t rank = 0; rank < plans.size(); ++rank) {
    std::set<std::pair<int, int>> forwards, backwards;
    for (const PlanStep& step : plans[rank]) {
      if (step.kind == PlanStep::Kind::kForward) {
        EXPECT_TRUE(forwards.insert({step.micro_batch, step.block}).second) << label;
      }
      if (step.kind == PlanStep::Kind::kBackward) {
        EXPECT_TRUE(backwards.insert({step.micro_batch, step.block}).second) << label;
        EXPECT_EQ(forwards.count({step.micro_batch, step.block}), 1U) << label;
      }
    }
    EXPECT_EQ(forwards.size(), static_cast<std::size_t>(shape.micro_batches * shape.virtual_stages)) << label;
    EXPECT_EQ(forwards, backwards) << label;
    for (const auto& [micro_batch, block] : forwards) EXPECT_EQ(block % shape.stages, static_cast<int>(rank)) << label;
  }
}

TEST(PipelinePlan, GpipeAndOneForwardOneBackwardHaveTheirBubbleAndMemory) {
  for (int p = 1; p <= 8; ++p) {
    for (const int m : kMicroBatches) {
      const PlanShape shape{p, 1, m};
      for (const PlanKind kind : {PlanKind::kGpipe, PlanKind::kOneForwardOneBackward}) {
        const std::string label =
            "p=" + std::to_string(p) + " m=" + std::to_string(m) + (kind == PlanKind::kGpipe ? " gpipe" : " 1f1b");
        const auto plans = make_pipeline_plan(kind, shape);
        expect_complete(plans, shape, label);
        for (const double backward_s : {1.0, 2.0, -2.0}) {  // the last: 2 with sends in the background
          const Sends sends = backward_s < 0 ? Sends::kInBackground : Sends::kBlocking;
          const SimulationResult result = simulate(plans, shape, 1, std::abs(backward_s), sends);
          ASSERT_TRUE(result.finished) << label << ": " << result.problem;
          EXPECT_DOUBLE_EQ(result.makespan, (m + p - 1) * (1 + std::abs(backward_s))) << label;
          EXPECT_NEAR(result.bubble(m * (1 + std::abs(backward_s))), static_cast<double>(p - 1) / m, 1e-12) << label;
          for (int rank = 0; rank < p; ++rank) {
            const int bound = kind == PlanKind::kGpipe ? m : std::min(m, p - rank);
            EXPECT_EQ(result.most_in_flight[static_cast<std::size_t>(rank)], bound) << label << " rank " << rank;
          }
        }
      }
    }
  }
}

TEST(PipelinePlan, InterleavedHasASmallerBubble) {
  for (int p = 2; p <= 8; ++p) {
    for (int v = 1; v <= 4; ++v) {
      for (int groups = 1; groups <= 4; ++groups) {
        const PlanShape shape{p, v, p * groups};
        const std::string label =
            "p=" + std::to_string(p) + " v=" + std::to_string(v) + " m=" + std::to_string(shape.micro_batches);
        const auto plans = make_pipeline_plan(PlanKind::kInterleaved, shape);
        expect_complete(plans, shape, label);
        const SimulationResult result = simulate(plans, shape, 1, 2);
        ASSERT_TRUE(result.finished) << label << ": " << result.problem;
        // One block costs 1/v of a stage: m v (1+2) of work, (p-1)(1+2) of bubble.
        EXPECT_NEAR(result.bubble(3.0 * v * shape.micro_batches), (p - 1.0) / (v * shape.micro_batches), 1e-12)
            << label;
      }
    }
  }
}

TEST(PipelinePlan, OneStageComputesOnly) {
  const auto plans = make_pipeline_plan(PlanKind::kOneForwardOneBackward, {1, 1, 3});
  ASSERT_EQ(plans.size(), 1U);
  EXPECT_EQ(plans[0].size(), 6U);
  for (const PlanStep& step : plans[0]) EXPECT_NE(step.kind, PlanStep::Kind::kExchange);
}

TEST(PipelinePlan, IllegalShapesAreRefusedWithTheNumbers) {
  expect_error(ExitCode::kUsage, {"multiple of 4", "got 6"}, [] {
    (void)make_pipeline_plan(PlanKind::kInterleaved, {4, 2, 6});
  });
  expect_error(ExitCode::kUsage, {"virtual_stages=2"}, [] { (void)make_pipeline_plan(PlanKind::kGpipe, {4, 2, 8}); });
  expect_error(ExitCode::kUsage, {"at least one"}, [] { (void)make_pipeline_plan(PlanKind::kGpipe, {4, 1, 0}); });
}

// Negative controls: the simulator must see a deadlock, a lost message and a backward before its forward.
TEST(Simulator, FindsBrokenPlans) {
  const PlanShape shape{3, 1, 4};
  const auto good = make_pipeline_plan(PlanKind::kOneForwardOneBackward, shape);
  {
    auto plans = good;  // a receive that nobody answers
    plans[1].erase(std::find_if(plans[1].rbegin(), plans[1].rend(),
                                [](const PlanStep& s) { return s.kind == PlanStep::Kind::kExchange; })
                       .base() -
                   1);
    EXPECT_FALSE(simulate(plans, shape, 1, 2).finished);
  }
  {
    auto plans = good;  // two ranks that each want to send before they receive
    for (const std::size_t rank : {std::size_t{0}, std::size_t{1}}) {
      for (std::size_t i = 0; i < plans[rank].size(); ++i) {
        if (plans[rank][i].kind != PlanStep::Kind::kExchange || plans[rank][i].transfers.size() < 2) continue;
        PlanStep first = plans[rank][i], second = plans[rank][i];
        first.transfers.resize(1);
        second.transfers.erase(second.transfers.begin());
        plans[rank][i] = first;
        plans[rank].insert(plans[rank].begin() + static_cast<std::ptrdiff_t>(i) + 1, second);
        ++i;
      }
    }
    const SimulationResult result = simulate(plans, shape, 1, 2, Sends::kBlocking);
    EXPECT_FALSE(result.finished);
    EXPECT_NE(result.problem.find("waits at exchange: send"), std::string::npos) << result.problem;
  }
  {
    auto plans = good;
    std::swap(plans[2][1], plans[2][3]);
    EXPECT_FALSE(simulate(plans, shape, 1, 2).finished);
  }
}

}  // namespace
}  // namespace cram::test
