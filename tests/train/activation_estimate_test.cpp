// The planned memory of activations against what a micro-step really takes, with the allocator that the programs use.
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cstdio>

#include "support/golden.h"
#include "train/cpu_memory.h"
#include "train/optimizer.h"
#include "train/run_plan.h"
#include "train/synthetic_batches.h"
#include "train/training_step.h"

namespace cram::test {
namespace {

const bool kInstalled = [] {
  install_cpu_memory();
  return true;
}();

struct Shape {
  const char* what;
  ModelConfig model;
  std::int64_t rows;
  const char* recompute = "none";
};

class ActivationEstimate : public testing::TestWithParam<Precision> {};
INSTANTIATE_TEST_SUITE_P(All, ActivationEstimate, testing::Values(Precision::kBf16, Precision::kFp32),
                         [](const auto& given) { return std::string(precision_name(given.param)); });

TEST_P(ActivationEstimate, IsWithinHalfOfThePeak) {
  at::set_num_threads(1);  // the peak is the same, and beside other tests threads that wait for each other are slow
  const at::NoGradGuard no_grad;
  const Shape shapes[] = {{"recipe's widths", model_of(2, 768, 12, 3072, 4096, 128), 4},
                          {"long rows", model_of(2, 128, 4, 256, 500, 2048), 1},
                          {"large vocabulary", model_of(1, 128, 2, 256, 32768, 128), 8},
                          {"small", model_of(4, 256, 4, 1024, 4096, 128), 8},
                          {"long rows, selective", model_of(2, 128, 4, 256, 500, 2048), 1, "selective"},
                          {"small, whole layers again", model_of(6, 256, 4, 1024, 4096, 128), 4, "layer"}};
  for (const Shape& shape : shapes) {
    Config given;
    given.model = shape.model;
    given.model.recompute = shape.recompute;
    given.train.precision = precision_name(GetParam());
    given.train.micro_batch_size = shape.rows;
    given.train.batch_size = given.train.batch_quantum = shape.rows;
    const Config config = resolve_train_config(given, Layout{});
    ParameterStore store;
    cram::Model model(config.model, store);
    store.allocate(GetParam(), at::kCPU, state_layout("adamw"));
    store.initialize(1);
    SyntheticBatches batches(config, 0, /*pin_memory=*/false);
    TrainingStep step(model, store, self_mesh(), training_step_settings(config), batches);
    step.accumulate({.micro_batches = 1});  // what is made once and kept (packed weights) is none of it
    reset_cpu_memory_peak();
    const std::int64_t before = cpu_memory_counts().bytes_in_use;
    step.accumulate({.micro_batches = 1});
    const auto peak = static_cast<double>(cpu_memory_counts().peak_bytes_in_use - before);
    const double planned = plan_run(config, Layout{}, shape.rows, masked_in_row(config)).stages[0].activation_bytes;
    std::printf("%s, %s: %.1f MB planned, %.1f MB measured, ratio %.2f\n", shape.what, precision_name(GetParam()),
                planned / 1e6, peak / 1e6, planned / peak);
    EXPECT_LE(planned / peak, 1.5) << shape.what;
    EXPECT_GE(planned / peak, 1 / 1.5) << shape.what;
  }
}

}  // namespace
}  // namespace cram::test
