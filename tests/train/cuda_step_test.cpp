// Micro-steps as real CUDA graphs, with copies on a side stream: the numbers of steps without them. Skipped where no
// GPU is visible.
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include "support/deterministic.h"
#include "support/golden.h"
#include "train/micro_steps.h"
#include "train/optimizer.h"

namespace cram {
namespace {

Batch made_batch(std::int64_t number) {
  const at::Tensor ids = (at::arange(4 * 16) * 7 + number * 3).remainder(90).add(5).view({4, 16}).contiguous();
  const at::Tensor positions = at::arange(number % 3 == 0 ? 12 : 9).mul(5);
  return {ids.pin_memory(), ids.flatten().index_select(0, positions).pin_memory(), positions.pin_memory(), 4};
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
  Encoder encoder(config.model, store);
  store.allocate(Precision::kBf16, at::Device(at::kCUDA, 0));
  store.initialize(0);
  GradSync sync = make_grad_sync(store, mesh, /*overlap=*/true);
  std::int64_t next = 0;
  MicroSteps steps(
      encoder, store, sync, mesh, config, [&] { return made_batch(next++); },
      make_step_graphs(config, mesh.layout(), store.device()));
  Optimizer optimizer(store, {}, mesh);
  Trained trained;
  for (std::int64_t step = 1; step <= 6; ++step) {
    (void)steps.run_batch(step, 0, 4);
    sync.finish();
    trained.losses.push_back(steps.totals().loss_sum);
    trained.norms.push_back(optimizer.grad_norm());
    optimizer.update(step, 1e-3, 1.0 / steps.totals().masked);
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
