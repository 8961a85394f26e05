// The table of linear structures: every row must pass the same checks.
#include "model/linear.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <cmath>

#include "support/expect_error.h"
#include "support/golden.h"

namespace cram {
namespace {

using test::relative_error;
using test::self_group;

struct Pair {
  std::string structure, name;
  LinearStyle style;
};

// Every style of every structure there is.
std::vector<Pair> all_pairs() {
  std::vector<Pair> pairs;
  for (const LinearStructure& row : linear_structures().rows()) {
    if (row.replicated != nullptr) pairs.push_back({row.name, "replicated", LinearStyle::kReplicated});
    if (row.column != nullptr) pairs.push_back({row.name, "column", LinearStyle::kColumn});
    if (row.row != nullptr) pairs.push_back({row.name, "row", LinearStyle::kRow});
  }
  return pairs;
}
class LinearTable : public testing::TestWithParam<Pair> {};
INSTANTIATE_TEST_SUITE_P(All, LinearTable, testing::ValuesIn(all_pairs()),
                         [](const auto& given) { return given.param.structure + "_" + given.param.name; });

constexpr std::int64_t kIn = 12, kOut = 20, kRows = 7;

at::Tensor random(at::IntArrayRef shape, std::uint64_t seed) {
  at::Generator generator = at::detail::createCPUGenerator(seed);
  return at::randn(shape, generator, at::kDouble);
}

TEST_P(LinearTable, ForwardIsTheMaterialisedMatrix) {
  ParameterStore store;
  const auto layer = make_linear(GetParam().structure, GetParam().style, {"x", kIn, kOut, 0.5}, store, self_group());
  store.allocate(Precision::kFp64, at::kCPU, test::adam_states());
  store.initialize(3);
  const at::Tensor x = random({kRows, kIn}, 1);
  EXPECT_EQ(layer->materialize().sizes(), (std::vector<std::int64_t>{kOut, kIn}));
  EXPECT_LE(relative_error(layer->forward(x, nullptr), at::mm(x, layer->materialize().t())), 1e-14);
}

TEST_P(LinearTable, GradientsAgreeWithFiniteDifferences) {
  ParameterStore store;
  const auto layer = make_linear(GetParam().structure, GetParam().style, {"x", kIn, kOut, 0.5}, store, self_group());
  store.allocate(Precision::kFp64, at::kCPU, test::adam_states());
  store.initialize(3);
  const at::Tensor x = random({kRows, kIn}, 1), dy = random({kRows, kOut}, 2);
  const auto value = [&] { return (layer->forward(x, nullptr) * dy).sum().item<double>(); };
  const auto difference = [&](const at::Tensor& flat, std::int64_t i) {
    constexpr double kStep = 1e-5;
    const double kept = flat[i].item<double>();
    flat[i].fill_(kept + kStep);
    const double above = value();
    flat[i].fill_(kept - kStep);
    const double below = value();
    flat[i].fill_(kept);
    return (above - below) / (2 * kStep);
  };
  Linear::Saved saved;
  (void)layer->forward(x, &saved);
  const at::Tensor dx = layer->backward(dy, saved);
  EXPECT_EQ(dx.sizes(), x.sizes());
  for (std::int64_t i = 0; i < x.numel(); i += 5) {
    EXPECT_NEAR(dx.reshape({-1})[i].item<double>(), difference(x.view({-1}), i), 1e-8);
  }
  for (ParamId id = 0; id < store.size(); ++id) {
    const at::Tensor flat = store.master(id).view({-1}), grad = store.grad(id).view({-1});
    EXPECT_GT(grad.abs().max().item<double>(), 0);
    for (std::int64_t i = 0; i < flat.numel(); i += 11) {
      EXPECT_NEAR(grad[i].item<double>(), difference(flat, i), 1e-8) << store.spec(id).name;
    }
  }
  // A second call adds.
  const at::Tensor once = store.grad(0).clone();
  (void)layer->backward(dy, saved);
  EXPECT_LE(relative_error(store.grad(0), 2 * once), 1e-14);
}

TEST_P(LinearTable, InitialVarianceIsAsAsked) {
  ParameterStore store;
  const auto layer = make_linear(GetParam().structure, GetParam().style, {"x", 300, 200, 0.02}, store, self_group());
  store.allocate(Precision::kFp64, at::kCPU, test::adam_states());
  store.initialize(3);
  const double n = 300 * 200;
  EXPECT_NEAR(layer->materialize().std().item<double>() / 0.02, 1, 6 / std::sqrt(2 * n));
  EXPECT_NEAR(layer->materialize().mean().item<double>(), 0, 6 * 0.02 / std::sqrt(n));
}

TEST(Linear, DenseHasOneDecayingWeightOfThePublicName) {
  ParameterStore store;
  const auto layer = make_linear("dense", LinearStyle::kReplicated, {"encoder.layers.3.attn.dense", kIn, kOut, 0.02},
                                 store, self_group());
  ASSERT_EQ(store.size(), 1U);
  const ParamSpec& spec = store.spec(0);
  EXPECT_EQ(spec.name, "encoder.layers.3.attn.dense.weight");
  EXPECT_EQ(spec.global_shape, (std::vector<std::int64_t>{kOut, kIn}));
  EXPECT_TRUE(spec.traits.decay);
  EXPECT_FALSE(spec.traits.full_precision);
}

TEST(Linear, UnknownStructuresAndStylesNameTheKnownOnes) {
  ParameterStore store;
  for (const char* structure : {"low-rank", ""}) {
    test::expect_error(ExitCode::kUsage, {"linear structure", structure, "known: dense"}, [&] {
      (void)make_linear(structure, LinearStyle::kReplicated, {"x", 4, 4, 0.02}, store, self_group());
    });
  }
  static const bool added = [] {
    linear_structures().add({"columns-only", nullptr, linear_structures().at("dense").column, nullptr});
    return true;
  }();
  EXPECT_TRUE(added);
  test::expect_error(ExitCode::kUsage, {"columns-only", "has no tensor-parallel style row", "it has: column"}, [&] {
    (void)make_linear("columns-only", LinearStyle::kRow, {"x", 4, 4, 0.02}, store, self_group());
  });
  EXPECT_EQ(store.size(), 0U);
}

TEST(AccumulateWeightGrad, SumsBf16ProductsInFp32) {
  // 300 additions of 1 to a gradient: a bf16 gradient would stop at 256.
  const at::Tensor grad = at::zeros({2, 3});
  const at::Tensor dy = at::ones({1, 2}, at::kBFloat16), x = at::ones({1, 3}, at::kBFloat16);
  for (int i = 0; i < 300; ++i) accumulate_weight_grad(grad, dy, x);
  EXPECT_TRUE(grad.equal(at::full({2, 3}, 300.0F)));
}

}  // namespace
}  // namespace cram
