#include "parallel/mesh.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <algorithm>
#include <set>

#include "support/expect_error.h"
#include "support/thread_ranks.h"

namespace cram::test {
namespace {

TEST(Layout, GroupsPartitionTheWorldForEveryProductUpTo64) {
  for (int tensor = 1; tensor <= 64; ++tensor) {
    for (int data = 1; tensor * data <= 64; ++data) {
      for (int pipeline = 1; tensor * data * pipeline <= 64; ++pipeline) {
        const Layout layout{tensor, pipeline, data};
        for (const Axis axis : {Axis::kTensor, Axis::kData, Axis::kPipeline}) {
          std::set<std::vector<int>> groups;
          std::set<int> members;
          for (int rank = 0; rank < layout.world_size(); ++rank) {
            const std::vector<int> group = group_ranks(layout, axis, rank);
            ASSERT_TRUE(std::is_sorted(group.begin(), group.end()));
            ASSERT_NE(std::find(group.begin(), group.end(), rank), group.end());
            if (groups.insert(group).second) {
              for (const int member : group) ASSERT_TRUE(members.insert(member).second) << "in two groups";
            }
            ASSERT_EQ(rank_of(layout, coordinates_of(layout, rank)), rank);
          }
          ASSERT_EQ(members.size(), static_cast<std::size_t>(layout.world_size()));
        }
      }
    }
  }
}

TEST(Layout, NeighboursAreTensorRanks) {
  const Layout layout{2, 3, 4};  // rank = tp + 2 * (dp + 4 * pp)
  EXPECT_EQ(coordinates_of(layout, 13), (MeshCoordinates{1, 2, 1}));
  EXPECT_EQ(group_ranks(layout, Axis::kTensor, 13), (std::vector<int>{12, 13}));
  EXPECT_EQ(group_ranks(layout, Axis::kData, 13), (std::vector<int>{9, 11, 13, 15}));
  EXPECT_EQ(group_ranks(layout, Axis::kPipeline, 13), (std::vector<int>{5, 13, 21}));
  EXPECT_EQ(layout.text(), "dp4·tp2·pp3");
  EXPECT_EQ(Layout{}.text(), "1");
}

TEST(Layout, DataIsWhatIsLeft) {
  EXPECT_EQ(layout_for(24, 2, 3).data, 4);
  expect_error(ExitCode::kUsage, {"6 ranks", "parallel.tensor=4", "parallel.pipeline=1"},
               [] { (void)layout_for(6, 4, 1); });
  expect_error(ExitCode::kUsage, {"8 ranks"}, [] { (void)layout_for(8, 0, 1); });
}

// Every rank contributes 1 << rank: the sum over a group says exactly who is in it.
TEST(Mesh, CommunicatorsHaveTheRanksTheLayoutNames) {
  for (const Layout layout : {Layout{1, 1, 1}, Layout{2, 1, 1}, Layout{1, 2, 1}, Layout{1, 1, 2}, Layout{2, 2, 2},
                              Layout{1, 3, 2}, Layout{4, 1, 2}}) {
    const auto messages = run_ranks(layout.world_size(), [&](Communicator& world) {
      const Mesh mesh(world, layout);
      const auto members = [&](Communicator& group) {
        const at::Tensor sum = at::full({1}, std::int64_t{1} << world.rank(), at::kLong);
        group.all_reduce_(sum);
        return sum.item<std::int64_t>();
      };
      const auto expected = [&](Axis axis) {
        std::int64_t bits = 0;
        for (const int rank : group_ranks(layout, axis, world.rank())) bits |= std::int64_t{1} << rank;
        return bits;
      };
      const auto require = [](bool condition, const char* what) {
        if (!condition) throw std::runtime_error(what);
      };
      require(members(mesh.tensor()) == expected(Axis::kTensor), "tensor group");
      require(members(mesh.data()) == expected(Axis::kData), "data group");
      require(members(mesh.pipeline()) == expected(Axis::kPipeline), "pipeline group");
      require(mesh.tensor().rank() == mesh.place().tp_rank && mesh.data().rank() == mesh.place().dp_rank &&
                  mesh.pipeline().rank() == mesh.place().pp_rank,
              "rank in its groups");
      const std::vector<int> stages = group_ranks(layout, Axis::kPipeline, world.rank());
      std::int64_t tied = std::int64_t{1} << world.rank();
      if (mesh.is_first_stage() || mesh.is_last_stage())
        tied = std::int64_t{1} << stages.front() | std::int64_t{1} << stages.back();
      require(members(mesh.tied()) == tied, "tied group");
    });
    for (const std::string& message : messages) EXPECT_EQ(message, "") << layout.text();
  }
}

TEST(Mesh, AnotherWorldSizeIsRefusedAlikeEverywhere) {
  for (const std::string& message : run_ranks(3, [](Communicator& world) {
         const Mesh mesh(world, Layout{2, 1, 1});
       })) {
    EXPECT_EQ(message, "layout tp2 needs 2 ranks, this job has 3");
  }
}

}  // namespace
}  // namespace cram::test
