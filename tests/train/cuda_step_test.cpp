// Micro-steps as real CUDA graphs, with copies on a side stream: the numbers of steps without them. Skipped where no
// GPU is visible.
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include "support/call_source.h"
#include "support/deterministic.h"
#include "support/golden.h"
#include "train/training_step.h"

namespace cram {
namespace {

Batch made_batch(std::int64_t number) {
  const at::Tensor ids = (at::arange(4 * 16) * 7 + number * 3).remainder(90).add(5).view({4, 16}).contiguous();
  const at::Tensor positions = at::arange(number % 3 == 0 ? 12 : 9).mul(5);
  return test::batch_of(ids.pin_memory(), positions.pin_memory(),
                        ids.flatten().index_select(0, positions).pin_memory());
}

struct Trained {
  std::vector<double> losses, norms;
  at::Tensor weights;
};

Trained train(const std::string& cuda_graph) {
  const at::NoGradGuard no_grad;
  const Mesh& mesh = test::self_mesh();
  Config config;
  config.model = test::model_of(2, 64, 2, 96, 101, 16);
  config.train.micro_batch_size = 4;
  config.run.cuda_graph = cuda_graph;
  ParameterStore store;
  Model model(config.model, store);
  store.allocate(Precision::kBf16, at::Device(at::kCUDA, 0), state_layout(config.train.optimizer));
  store.initialize(0);
  test::CallSource source([number = std::int64_t{0}]() mutable { return made_batch(number++); });
  TrainingStep training_step(
      model, store, mesh, training_step_settings(config), source,
      make_step_graphs(choose_cuda_graph(config, mesh.layout(), store.device()), store.device()));
  Trained trained;
  for (std::int64_t step = 1; step <= 6; ++step) {
    const auto result = training_step.run({.step = step, .update = step, .micro_batches = 4, .lr = 1e-3});
    trained.losses.push_back(result.loss);
    trained.norms.push_back(result.grad_norm);
  }
  trained.weights = store.buffers()[0].master.cpu();
  return trained;
}

TEST(CudaGraph, GivesTheNumbersOfStepsWithoutIt) {
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU is visible to this process (or the build has no CUDA)";
  const test::Deterministic deterministic;
  const Trained plain = train("off"), recorded = train("on");
  for (std::size_t i = 0; i < plain.losses.size(); ++i) {
    EXPECT_NEAR(recorded.losses[i] / plain.losses[i], 1, 1e-6) << "step " << i + 1;
    EXPECT_NEAR(recorded.norms[i] / plain.norms[i], 1, 1e-5) << "step " << i + 1;
  }
  EXPECT_LE(test::relative_error(recorded.weights, plain.weights), 1e-5);
}

}  // namespace
}  // namespace cram
