// The same training on the CPU and on the device under test (CRAM_TEST_DEVICE): the model, the weights, the rows and
// the steps are equal, so losses, raw gradients and parameters agree within the tolerances of docs/decisions.md.
// Without a GPU the device is the CPU once more, with other micro-batches, so that the figures compared still come from
// two different ways to add.
#include <cstdio>
#include <regex>

#include "parallel/training_support.h"

namespace cram::test {
namespace {

TrainingSetup setup_of(Precision precision) {
  TrainingSetup setup;
  setup.precision = precision;
  return setup;
}

// The widths of the recipe, on two layers and few rows, so that a CPU has it in seconds.
TrainingSetup wide_setup_of(Precision precision) {
  TrainingSetup setup = setup_of(precision);
  setup.model = model_of(2, 768, 12, 3072, 4096, 128);
  setup.batch_size = 8;
  setup.micro_batch = 4;
  setup.bucket_elements = 4'194'304;
  setup.steps = 1;
  return setup;
}

TrainingResult on_cpu(TrainingSetup setup) {
  setup.device = at::kCPU;
  return train(setup);
}

TrainingResult on_device(TrainingSetup setup) {
  if (setup.device.is_cpu()) setup.micro_batch *= 2;
  return train(setup);
}

struct Differences {
  double loss, norm, gradient, parameter;
};

Differences compare(const TrainingResult& cpu, const TrainingResult& device, const char* what) {
  for (const TrainingResult* result : {&cpu, &device}) {
    for (const std::string& message : result->messages) EXPECT_EQ(message, "") << what;
  }
  const auto [gradient, where] = worst_norm_error(cpu.first_gradients, device.first_gradients);
  const Differences found{worst_relative(cpu.losses, device.losses), worst_relative(cpu.norms, device.norms), gradient,
                          worst_norm_error(cpu.final, device.final).first};
  std::printf("%s: loss %.1e, gradient norm %.1e, gradient %.1e (%s), parameters %.1e\n", what, found.loss, found.norm,
              found.gradient, where.c_str(), found.parameter);
  return found;
}

TEST(DeviceParity, InitialParametersAreTheSameBits) {
  TrainingSetup setup = setup_of(Precision::kFp32);
  setup.steps = 1;
  const TrainingResult cpu = on_cpu(setup), device = on_device(setup);
  ASSERT_EQ(cpu.initial.size(), device.initial.size());
  for (const auto& [name, tensor] : cpu.initial) EXPECT_TRUE(at::equal(tensor, device.initial.at(name))) << name;
}

TEST(DeviceParity, Fp64) {
  const TrainingSetup setup = setup_of(Precision::kFp64);
  const Differences found = compare(on_cpu(setup), on_device(setup), "fp64, 20 steps");
  EXPECT_LE(found.loss, 1e-12);
  EXPECT_LE(found.norm, 1e-10);
  EXPECT_LE(found.gradient, 1e-10);
  EXPECT_LE(found.parameter, 1e-9);
}

TEST(DeviceParity, Fp32) {
  const TrainingSetup setup = setup_of(Precision::kFp32);
  const Differences found = compare(on_cpu(setup), on_device(setup), "fp32, 20 steps");
  EXPECT_LE(found.loss, 1e-5);
  EXPECT_LE(found.norm, 1e-4);
  EXPECT_LE(found.gradient, 1e-4);
  EXPECT_LE(found.parameter, 1e-4);
}

TEST(DeviceParity, Fp32AtTheWidthsOfTheRecipe) {
  const TrainingSetup setup = wide_setup_of(Precision::kFp32);
  const Differences found = compare(on_cpu(setup), on_device(setup), "fp32, 2x768, 1 step");
  EXPECT_LE(found.loss, 1e-6);
  EXPECT_LE(found.norm, 1e-4);
  EXPECT_LE(found.gradient, 1e-4);
}

// 4 * 1.03^(L+1-l) * 2^-7: the error of bf16 grows on the way back from the last layer.
double bf16_tolerance(const std::string& name, std::int64_t layers) {
  std::smatch match;
  std::int64_t layer = layers;  // the final norm
  if (std::regex_search(name, match, std::regex("layers\\.([0-9]+)\\."))) layer = std::stoll(match[1]);
  if (name.find("embedding") != std::string::npos) layer = -1;
  return 4 * std::pow(1.03, static_cast<double>(layers - layer)) / 128;
}

void expect_bf16_parity(const TrainingSetup& setup, const char* what) {
  const TrainingResult cpu = on_cpu(setup), device = on_device(setup);
  const Differences found = compare(cpu, device, what);
  EXPECT_LE(found.loss, 1e-2);
  for (const auto& [name, gradient] : cpu.first_gradients) {
    EXPECT_LE(norm_error(device.first_gradients.at(name), gradient), bf16_tolerance(name, setup.model.layers)) << name;
  }
}

TEST(DeviceParity, Bf16) { expect_bf16_parity(setup_of(Precision::kBf16), "bf16, 20 steps"); }

TEST(DeviceParity, Bf16AtTheWidthsOfTheRecipe) {
  expect_bf16_parity(wide_setup_of(Precision::kBf16), "bf16, 2x768, 1 step");
}

// A device that loses one gradient of sixteen matrices must be seen in every figure.
TEST(DeviceParity, ALostGradientIsSeen) {
  TrainingSetup setup = setup_of(Precision::kFp32);
  const TrainingResult cpu = on_cpu(setup);
  setup.meddle = [](ParameterStore& store, const Mesh&, std::int64_t) {
    for (const ParameterStore::OwnedRange& range : store.owned(store.find("encoder.layers.2.attn.dense.weight"))) {
      range.grad.zero_();
    }
  };
  const Differences found = compare(cpu, on_device(setup), "one gradient lost");
  EXPECT_GT(found.loss, 1e-5);
  EXPECT_GT(found.norm, 1e-4);
  EXPECT_GT(found.gradient, 1e-2);
  EXPECT_GT(found.parameter, 1e-4);
}

}  // namespace
}  // namespace cram::test
