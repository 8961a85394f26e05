// The layouts under mpirun: every rank trains alone first, then together, and compares what it holds.
#include <ATen/Parallel.h>

#include "parallel/mpi_environment.h"
#include "parallel/training_support.h"

namespace cram::test {
namespace {

Communicator* g_world = nullptr;  // gtest offers its tests no other way to the main function's objects

struct Row {
  int tensor, pipeline, data;
  std::int64_t virtual_stages;
};

std::vector<Row> rows_for(int ranks) {
  switch (ranks) {
    case 1: return {{1, 1, 1, 1}};
    case 2: return {{1, 1, 2, 1}, {2, 1, 1, 1}, {1, 2, 1, 1}, {1, 2, 1, 2}};
    case 3: return {{1, 1, 3, 1}, {1, 3, 1, 1}};
    case 4: return {{2, 1, 2, 1}, {1, 2, 2, 1}, {2, 2, 1, 1}, {4, 1, 1, 1}, {1, 4, 1, 1}, {1, 1, 4, 1}, {1, 2, 2, 2}};
    default: return {{2, 2, 2, 1}, {2, 2, 2, 2}};
  }
}

// ||found - expected|| / ||expected|| over the elements that this rank holds.
double error_where_held(const at::Tensor& found, const at::Tensor& expected) {
  const at::Tensor held = found.isnan().logical_not();
  if (!held.any().item<bool>()) return 0;
  return norm_error(found.masked_select(held), expected.masked_select(held));
}

void expect_the_same(const std::map<std::string, at::Tensor>& found, const std::map<std::string, at::Tensor>& expected,
                     double tolerance, const std::string& what) {
  EXPECT_FALSE(found.empty());
  for (const auto& [name, tensor] : found)
    EXPECT_LE(error_where_held(tensor, expected.at(name)), tolerance) << what << name;
}

TEST(MpiTraining, EveryLayoutTrainsLikeOneRank) {
  const auto train_on = [](Communicator& world, const TrainingSetup& setup) {
    TrainingResult result;
    result.state_bytes.resize(static_cast<std::size_t>(setup.layout.world_size()));
    std::mutex mutex;
    train_rank(world, setup, result, mutex);
    return result;
  };
  TrainingSetup alone;
  const std::unique_ptr<Communicator> self = make_self_communicator();
  const TrainingResult one = train_on(*self, alone);
  for (const Row& row : rows_for(g_world->size())) {
    for (const bool zero : {false, true}) {
      for (const bool sequence_parallel : {false, true}) {
        if (sequence_parallel && row.tensor == 1) continue;
        TrainingSetup setup;
        setup.layout = {row.tensor, row.pipeline, row.data};
        setup.virtual_stages = row.virtual_stages;
        setup.zero = zero;
        setup.sequence_parallel = sequence_parallel;
        const TrainingResult many = train_on(*g_world, setup);
        const std::string what = setup.text() + " ";
        expect_the_same(many.first_gradients, one.first_gradients, 1e-10, what);
        expect_the_same(many.final, one.final, 1e-9, what);
        expect_the_same(many.states.at("exp_avg_sq"), one.states.at("exp_avg_sq"), 1e-9, what);
        EXPECT_TRUE(many.norms_agree) << what;
        for (std::size_t i = 0; i < many.losses.size(); ++i) {  // none but on rank 0
          EXPECT_NEAR(many.losses[i] / one.losses[i], 1, 1e-12) << what;
          EXPECT_NEAR(many.norms[i] / one.norms[i], 1, 1e-10) << what;
        }
        // The same bits again without overlap.
        setup.overlap = false;
        setup.steps = 5;
        const TrainingResult again = train_on(*g_world, setup);
        EXPECT_TRUE(std::equal(again.losses.begin(), again.losses.end(), many.losses.begin())) << what;
      }
    }
  }
}

}  // namespace
}  // namespace cram::test

int main(int argc, char** argv) {
  const cram::Launch launch = cram::detect_launch();
  const cram::MpiEnvironment environment(launch, &argc, &argv);
  testing::InitGoogleTest(&argc, argv);
  at::set_num_threads(1);
  const std::unique_ptr<cram::Communicator> world = cram::make_mpi_communicator();
  cram::test::g_world = world.get();
  const int result = RUN_ALL_TESTS();
  // mpirun's exit code is any rank's; the others have printed theirs.
  const at::Tensor failed = at::full({1}, result, at::kLong);
  world->all_reduce_(failed, cram::ReduceOp::kMax);
  return failed.item<std::int64_t>() != 0 ? 1 : 0;
}
