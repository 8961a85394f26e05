// AdamW, clipping and the gradient norm: against a long double oracle, the golden run of the reference twin, and the
// promises of bitwise independence.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <bit>
#include <cmath>

#include "base/rng.h"
#include "model/kernels/adamw.h"
#include "support/golden.h"
#include "train/optimizer.h"

namespace cram {
namespace {

using kernels::adamw_chunk;
using kernels::AdamWStep;
using kernels::kOptimizerChunk;
using kernels::sum_of_squares;
using test::Golden;
using test::Model;
using test::relative_error;
using test::self_mesh;

template <class Real>
struct State {
  std::vector<Real> master, grad, exp_avg, exp_avg_sq;
  explicit State(std::size_t count, std::uint64_t seed = 1)
      : master(count), grad(count), exp_avg(count), exp_avg_sq(count) {
    RandomStream random(seed);
    const auto value = [&] { return static_cast<Real>(2 * random.uniform() - 1); };
    for (std::size_t i = 0; i < count; ++i) {
      master[i] = value();
      grad[i] = value() * 100;
      exp_avg[i] = value();
      exp_avg_sq[i] = std::abs(value());
    }
  }
  void step(const AdamWStep& s, std::size_t begin, std::size_t end, std::uint16_t* working = nullptr) {
    adamw_chunk(s, master.data() + begin, grad.data() + begin, exp_avg.data() + begin, exp_avg_sq.data() + begin,
                working == nullptr ? nullptr : working + begin, static_cast<std::int64_t>(end - begin));
  }
};

const AdamWStep kStep{
    .lr = 1e-2, .beta1 = 0.9, .beta2 = 0.98, .eps = 1e-12, .weight_decay = 0.1, .grad_scale = 0.01, .step = 3};

// Loshchilov & Hutter 2019, algorithm 2, in long double.
template <class Real>
void expect_oracle(std::size_t count, double tolerance) {
  State<Real> state(count);
  const State<Real> before = state;
  state.step(kStep, 0, count);
  const long double lr = kStep.lr, beta1 = kStep.beta1, beta2 = kStep.beta2;
  for (std::size_t i = 0; i < count; ++i) {
    const long double g = static_cast<long double>(before.grad[i]) * static_cast<long double>(kStep.grad_scale);
    const long double m = beta1 * static_cast<long double>(before.exp_avg[i]) + (1 - beta1) * g;
    const long double v = beta2 * static_cast<long double>(before.exp_avg_sq[i]) + (1 - beta2) * g * g;
    const long double m_hat = m / (1 - std::pow(beta1, 3.0L)), v_hat = v / (1 - std::pow(beta2, 3.0L));
    const long double update = lr * m_hat / (std::sqrt(v_hat) + static_cast<long double>(kStep.eps));
    const long double master =
        static_cast<long double>(before.master[i]) * (1 - lr * static_cast<long double>(kStep.weight_decay)) - update;
    const auto near = [&](Real found, long double expected, long double scale, const char* what) {
      ASSERT_LE(std::abs(static_cast<long double>(found) - expected), static_cast<long double>(tolerance) * scale)
          << what << " " << i << " of " << count;
    };
    near(state.exp_avg[i], m, 1, "exp_avg");
    near(state.exp_avg_sq[i], v, 1, "exp_avg_sq");
    near(state.master[i], master, 1 + std::abs(update), "master");
    ASSERT_EQ(state.grad[i], 0) << "the gradient was not cleared";
  }
}

TEST(AdamWChunk, AgreesWithTheOracleAtEverySize) {
  for (const std::size_t count : {0U, 1U, 15U, 16U, 17U, 65535U, 65536U, 65537U}) {
    expect_oracle<float>(count, 4e-7);  // a few roundings of 2^-24
    expect_oracle<double>(count, 1e-15);
  }
}

template <class Real>
void expect_chunking_is_invisible() {
  constexpr std::size_t kCount = 1000;
  State<Real> whole(kCount);
  std::vector<std::uint16_t> whole_working(kCount), part_working(kCount);
  whole.step(kStep, 0, kCount, whole_working.data());
  for (const std::size_t piece : {1U, 7U, 16U, 33U, 999U}) {
    State<Real> parts(kCount);
    for (std::size_t begin = 0; begin < kCount; begin += piece) {
      parts.step(kStep, begin, std::min(kCount, begin + piece), part_working.data());
    }
    EXPECT_EQ(parts.master, whole.master) << piece;
    EXPECT_EQ(parts.exp_avg, whole.exp_avg) << piece;
    EXPECT_EQ(parts.exp_avg_sq, whole.exp_avg_sq) << piece;
    EXPECT_EQ(part_working, whole_working) << piece;
  }
}

TEST(AdamWChunk, ChunkingChangesNoBit) {
  expect_chunking_is_invisible<float>();
  expect_chunking_is_invisible<double>();
}

TEST(AdamWChunk, DenormalMomentsAreFlushed) {
  for (const float moment : {1e-40F, 1.2e-38F}) {  // denormal, and one step of decay away from it
    float master = 1, grad = 0, exp_avg = 0, exp_avg_sq = moment;
    adamw_chunk(kStep, &master, &grad, &exp_avg, &exp_avg_sq, nullptr, 1);
    if (moment * 0.98F < std::numeric_limits<float>::min()) {
      EXPECT_EQ(exp_avg_sq, 0);
    }
    exp_avg = moment;
    adamw_chunk(kStep, &master, &grad, &exp_avg, &exp_avg_sq, nullptr, 1);
    EXPECT_EQ(exp_avg, 0);
  }
  // The caller's own arithmetic still has denormals.
  volatile float tiny = 1e-38F;
  EXPECT_GT(tiny / 4, 0);
  double master = 1, grad = 0, exp_avg = 0, exp_avg_sq = 1e-310;
  adamw_chunk(kStep, &master, &grad, &exp_avg, &exp_avg_sq, nullptr, 1);
  EXPECT_EQ(exp_avg_sq, 0);
}

TEST(AdamWChunk, AZeroGradientWithoutHistoryMovesNothingButDecay) {
  float master = 2, grad = 0, exp_avg = 0, exp_avg_sq = 0;
  adamw_chunk(kStep, &master, &grad, &exp_avg, &exp_avg_sq, nullptr, 1);
  EXPECT_EQ(master, 2 * (1 - 1e-2F * 0.1F));
  EXPECT_EQ(exp_avg, 0);
  EXPECT_EQ(exp_avg_sq, 0);
}

// Every upper half of a float with the lower halves around a rounding decision.
TEST(AdamWChunk, WorkingCopiesAreTheMasterRoundedToNearestEven) {
  std::vector<std::uint32_t> patterns;
  for (std::uint32_t upper = 0; upper < 0x10000; ++upper) {
    for (const std::uint32_t lower : {0U, 1U, 0x7fffU, 0x8000U, 0x8001U, 0xffffU})
      patterns.push_back(upper << 16 | lower);
  }
  State<float> state(patterns.size());
  for (std::size_t i = 0; i < patterns.size(); ++i) {
    state.master[i] = std::bit_cast<float>(patterns[i]);
    state.grad[i] = state.exp_avg[i] = state.exp_avg_sq[i] = 0;
  }
  AdamWStep still = kStep;  // moves nothing
  still.lr = 0;
  std::vector<std::uint16_t> working(patterns.size(), 0xaaaa);
  state.step(still, 0, patterns.size(), working.data());
  for (std::size_t i = 0; i < patterns.size(); ++i) {
    const auto before = std::bit_cast<float>(patterns[i]);
    if (std::isnan(before)) {
      ASSERT_TRUE(std::isnan(state.master[i]));
      ASSERT_EQ(working[i] & 0x7f80U, 0x7f80U) << std::hex << patterns[i];
      ASSERT_NE(working[i] & 0x7fU, 0U) << "NaN became infinity: " << std::hex << patterns[i];
      continue;
    }
    if (before != 0 && std::abs(before) < std::numeric_limits<float>::min()) {
      ASSERT_EQ(state.master[i], 0);
      ASSERT_EQ(working[i] & 0x7fffU, 0U);
      continue;
    }
    ASSERT_EQ(std::bit_cast<std::uint32_t>(state.master[i]), patterns[i]);
    // The two neighbours, in integers: truncation and the next away from zero.
    const std::uint32_t down = patterns[i] >> 16, rest = patterns[i] & 0xffffU;
    const std::uint32_t expected = rest > 0x8000U || (rest == 0x8000U && (down & 1U) != 0) ? down + 1 : down;
    ASSERT_EQ(working[i], expected) << std::hex << patterns[i];
    ASSERT_EQ(working[i], c10::BFloat16(before).x) << std::hex << patterns[i];
  }
}

TEST(SumOfSquares, IsExactOnIntegersAtEverySize) {
  for (const std::int64_t count : {0, 1, 15, 16, 17, 1000, 65535, 65536, 65537}) {
    std::vector<float> single(static_cast<std::size_t>(count));
    std::vector<double> twice(static_cast<std::size_t>(count));
    double expected = 0;
    for (std::size_t i = 0; i < single.size(); ++i) {
      const auto value = static_cast<int>(i % 13) - 6;
      single[i] = static_cast<float>(value);
      twice[i] = value;
      expected += value * value;
    }
    EXPECT_EQ(kernels::sum_of_squares_of(single.data(), count), expected) << count;
    EXPECT_EQ(kernels::sum_of_squares_of(twice.data(), count), expected) << count;
  }
}

TEST(SumOfSquares, AddsInDoublePrecision) {
  // In fp32 the sum of 65536 squares of 1 + 2^-12 would lose the small part.
  const std::vector<float> values(65536, 1 + 0x1p-12F);
  EXPECT_EQ(kernels::sum_of_squares_of(values.data(), 65536), 65536 * (1 + 0x1p-12) * (1 + 0x1p-12));
  const std::vector<float> large(4, 1e30F);  // the square overflows fp32
  EXPECT_NEAR(kernels::sum_of_squares_of(large.data(), 4) / 4e60, 1, 1e-6);
}

TEST(ClipFactor, IsTheFormula) {
  EXPECT_EQ(clip_factor(0, 0.5), 1);
  EXPECT_EQ(clip_factor(0.4, 0.5), 1);
  EXPECT_EQ(clip_factor(2, 0.5), 0.5 / (2 + 1e-6));
  EXPECT_EQ(clip_factor(1e9, 0), 1) << "0 is no clipping";
  EXPECT_LT(clip_factor(0.5, 0.5), 1) << "the 1e-6 of the public code";
}

// Sizes off every multiple of 16 and 64, and more than one optimizer chunk.
ModelConfig odd_config() { return test::model_of(2, 66, 3, 70, 1501, 8); }

TEST(GradNorm, OfOnesIsTheRootOfTheParameterCount) {
  for (const Precision precision : {Precision::kFp64, Precision::kFp32, Precision::kBf16}) {
    Model model(odd_config(), precision);
    ASSERT_GT(model.store.buffers()[0].numel, kOptimizerChunk);
    for (ParamId id = 0; id < model.store.size(); ++id) model.store.grad(id).fill_(1);
    EXPECT_EQ(std::sqrt(Optimizer("adamw", model.store, {}, self_mesh()).own_sum_of_squares()),
              std::sqrt(static_cast<double>(parameter_count(odd_config()))));
  }
}

void fill_random_gradients(Model& model) {
  for (ParamId id = 0; id < model.store.size(); ++id) {
    std::vector<double> values(static_cast<std::size_t>(model.store.local_numel(id)));
    fill_normal(id, 0, 0, 1, values.data(), values.size());
    model.store.grad(id).copy_(at::tensor(values, at::kDouble).view(model.store.local_shape(id)));
  }
}

TEST(Optimizer, ThreadCountChangesNoBit) {
  const int threads = at::get_num_threads();
  for (const Precision precision : {Precision::kFp64, Precision::kFp32, Precision::kBf16}) {
    double norm = -1;
    std::vector<at::Tensor> masters;
    for (const int count : {1, 2, 3, 5}) {
      at::set_num_threads(count);
      Model model(odd_config(), precision);
      fill_random_gradients(model);
      Optimizer optimizer("adamw", model.store, {}, self_mesh());
      const double found = std::sqrt(optimizer.own_sum_of_squares());
      optimizer.update({1, 1e-2, 0.01});
      if (norm < 0) {
        norm = found;
        for (const FlatBuffers& b : model.store.buffers()) masters.push_back(b.master.clone());
      }
      EXPECT_EQ(found, norm) << count << " threads";
      for (std::size_t i = 0; i < masters.size(); ++i) EXPECT_TRUE(model.store.buffers()[i].master.equal(masters[i]));
    }
  }
  at::set_num_threads(threads);
}

TEST(Optimizer, SeesNonFiniteGradients) {
  for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    Model model(odd_config(), Precision::kFp32);
    fill_random_gradients(model);
    model.store.grad(model.store.size() - 1)[3].fill_(bad);
    EXPECT_FALSE(std::isfinite(std::sqrt(Optimizer("adamw", model.store, {}, self_mesh()).own_sum_of_squares())));
  }
}

TEST(Optimizer, DecaysMatricesAndThePositionScaleOnly) {
  Model model(odd_config(), Precision::kFp64);
  std::vector<at::Tensor> before;
  for (ParamId id = 0; id < model.store.size(); ++id) {
    model.store.master(id).add_(3);
    before.push_back(model.store.master(id).clone());
  }
  Optimizer("adamw", model.store, {.weight_decay = 0.5}, self_mesh()).update({1, 0.1, 1});  // gradients are zero
  for (ParamId id = 0; id < model.store.size(); ++id) {
    const std::string& name = model.store.spec(id).name;
    const double factor = name.find("norm") != std::string::npos ? 1 : 0.95;
    EXPECT_LE(relative_error(model.store.master(id), before[id] * factor), 1e-15) << name;
  }
}

TEST(Optimizer, ClearsGradientsKeepsPaddingZeroAndRefreshesWorkingWeights) {
  Model model(odd_config(), Precision::kBf16);
  Optimizer optimizer("adamw", model.store, {}, self_mesh());
  for (int step = 1; step <= 3; ++step) {
    fill_random_gradients(model);
    optimizer.update({step, 1e-2, 1});
  }
  std::int64_t elements = 0;
  for (FlatBuffers& b : model.store.buffers()) {
    EXPECT_EQ(b.grad.abs().max().item<float>(), 0);
    EXPECT_TRUE(b.working.equal(b.master.to(b.working.scalar_type())));
    elements += b.states[1].tensor.ne(0).sum().item<std::int64_t>();
  }
  EXPECT_EQ(elements, parameter_count(odd_config())) << "padding moved, or an element did not";
}

// Fifty steps of the reference twin, with clipping in some of them.
TEST(GoldenRun, FiftyStepsAgree) {
  const Golden golden("two_layers");
  Model model(golden.config, Precision::kFp64);
  model.load(golden);
  Optimizer optimizer("adamw", model.store, {}, self_mesh());
  int clipped = 0;
  for (int step = 1; step <= 50; ++step) {
    const std::string prefix = concat("step.", step, ".");
    const at::Tensor labels = golden.at(prefix + "labels");
    const auto count = static_cast<double>(labels.numel());
    const double loss =
        model.forward_backward(golden.at(prefix + "ids"), golden.at(prefix + "positions"), labels).item<double>();
    const double norm = std::sqrt(optimizer.own_sum_of_squares()) / count;
    const double factor = clip_factor(norm, 0.5);
    optimizer.update({step, golden.at("lrs")[step - 1].item<double>(), factor / count});
    EXPECT_NEAR(loss / count / golden.number(prefix + "loss_mean"), 1, 1e-10) << step;
    EXPECT_NEAR(norm / golden.number(prefix + "grad_norm"), 1, 1e-10) << step;
    EXPECT_NEAR(factor / golden.number(prefix + "clip_factor"), 1, 1e-10) << step;
    clipped += factor < 1 ? 1 : 0;
  }
  EXPECT_GT(clipped, 0);
  EXPECT_LT(clipped, 50);
  for (ParamId id = 0; id < model.store.size(); ++id) {
    const std::string& name = model.store.spec(id).name;
    EXPECT_LE(relative_error(model.store.master(id), golden.at("after50." + name)), 1e-10) << name;
    EXPECT_LE(relative_error(model.store.state(id, "exp_avg"), golden.at("after50.exp_avg." + name)), 1e-10) << name;
    EXPECT_LE(relative_error(model.store.state(id, "exp_avg_sq"), golden.at("after50.exp_avg_sq." + name)), 1e-10)
        << name;
  }
}

TEST(GoldenRun, Fp32AndBf16FollowIt) {
  const Golden golden("two_layers");
  for (const Precision precision : {Precision::kFp32, Precision::kBf16}) {
    Model model(golden.config, precision);
    model.load(golden);
    Optimizer optimizer("adamw", model.store, {}, self_mesh());
    for (int step = 1; step <= 50; ++step) {
      const std::string prefix = concat("step.", step, ".");
      const at::Tensor labels = golden.at(prefix + "labels");
      const auto count = static_cast<double>(labels.numel());
      const double loss =
          model.forward_backward(golden.at(prefix + "ids"), golden.at(prefix + "positions"), labels).item<double>();
      const double norm = std::sqrt(optimizer.own_sum_of_squares()) / count;
      optimizer.update({step, golden.at("lrs")[step - 1].item<double>(), clip_factor(norm, 0.5) / count});
      const double limit = precision == Precision::kBf16 ? 1e-2 : step == 1 ? 1e-6 : 1e-5;
      EXPECT_NEAR(loss / count / golden.number(prefix + "loss_mean"), 1, limit)
          << precision_name(precision) << " " << step;
    }
  }
}

}  // namespace
}  // namespace cram
