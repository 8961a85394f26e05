// The composed kernels against ATen's autograd and hand-made sums. They are the oracle of every fused version.
#include "model/kernels/kernels.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <cmath>

#include "support/golden.h"

namespace cram {
namespace {

using test::norm_error;
using test::relative_error;

at::Tensor random(at::IntArrayRef shape, std::uint64_t seed, double scale = 1) {
  at::Generator generator = at::detail::createCPUGenerator(seed);
  return at::randn(shape, generator, at::kDouble) * scale;
}

TEST(LayerNorm, AgreesWithAutogradAndAddsToTheGradients) {
  for (const auto& [rows, hidden] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {1, 7}, {13, 48}, {4, 65}}) {
    at::Tensor x = random({rows, hidden}, 1, 3).requires_grad_();
    at::Tensor weight = random({hidden}, 2).requires_grad_();
    at::Tensor bias = random({hidden}, 3).requires_grad_();
    const at::Tensor dy = random({rows, hidden}, 4);
    const at::Tensor y = at::layer_norm(x, {hidden}, weight, bias, 1e-12);
    y.backward(dy);

    const kernels::NormOutput out = kernels::layer_norm(x.detach(), weight.detach(), bias.detach(), 1e-12);
    EXPECT_LE(relative_error(out.y, y.detach()), 1e-13);
    const at::Tensor weight_grad = at::ones({hidden}, at::kDouble), bias_grad = at::full({hidden}, 2, at::kDouble);
    const at::Tensor dx =
        kernels::layer_norm_backward(dy, x.detach(), out, weight.detach(), bias.detach(), weight_grad, bias_grad);
    if (hidden == 1) {  // no variance: everything is rounding times 1/sqrt(eps)
      EXPECT_TRUE(at::isfinite(dx).all().item<bool>());
      continue;
    }
    EXPECT_LE(relative_error(dx, x.grad()), 1e-11);
    EXPECT_LE(relative_error(weight_grad - 1, weight.grad()), 1e-11);
    EXPECT_LE(relative_error(bias_grad - 2, bias.grad()), 1e-13);
  }
}

TEST(LayerNorm, AgreesWithTheFormula) {
  const at::Tensor x = random({5, 33}, 1, 2) + 7, weight = random({33}, 2), bias = random({33}, 3);
  const at::Tensor mean = x.mean(1, true);
  const at::Tensor variance = (x - mean).square().mean(1, true);
  const at::Tensor expected = (x - mean) / (variance + 1e-12).sqrt() * weight + bias;
  EXPECT_LE(relative_error(kernels::layer_norm(x, weight, bias, 1e-12).y, expected), 1e-12);
}

TEST(LayerNorm, KeepsFullPrecisionStatisticsInBf16) {
  const at::Tensor x = (random({8, 256}, 1) + 20).to(at::kBFloat16);  // a mean that bf16 sums would lose
  const at::Tensor weight = at::ones({256}), bias = at::zeros({256});
  const kernels::NormOutput out = kernels::layer_norm(x, weight, bias, 1e-12);
  EXPECT_EQ(out.y.scalar_type(), at::kBFloat16);
  EXPECT_EQ(out.mean.scalar_type(), at::kFloat);
  EXPECT_EQ(out.rstd.scalar_type(), at::kFloat);
  const kernels::NormOutput exact =
      kernels::layer_norm(x.to(at::kDouble), weight.to(at::kDouble), bias.to(at::kDouble), 1e-12);
  EXPECT_LE(relative_error(out.mean, exact.mean), 1e-6);
  EXPECT_LE(relative_error(out.rstd, exact.rstd), 1e-5);
  EXPECT_LE(relative_error(out.y, exact.y), 0x1p-8);
}

at::Tensor geglu_reference(const at::Tensor& u) {
  const std::vector<at::Tensor> halves = u.chunk(2, -1);
  return 0.5 * halves[1] * (1 + at::erf(halves[1] / std::sqrt(2.0))) * halves[0];
}

TEST(Geglu, AgreesWithAutogradOfTheErfFormula) {
  for (const double scale : {0.1, 1.0, 6.0}) {
    at::Tensor u = random({9, 26}, 1, scale).requires_grad_();
    const at::Tensor d_out = random({9, 13}, 2);
    const at::Tensor y = geglu_reference(u);
    y.backward(d_out);
    EXPECT_LE(relative_error(kernels::geglu(u.detach()), y.detach()), 1e-13);
    EXPECT_LE(relative_error(kernels::geglu_backward(d_out, u.detach()), u.grad()), 1e-13);
  }
}

TEST(Geglu, TheSecondHalfIsTheGate) {
  // value 3, gate -40: the gate closes. The other way round it is gelu(3) times -40.
  const at::Tensor u = at::tensor({3.0, -40.0}, at::kDouble).view({1, 2});
  EXPECT_EQ(kernels::geglu(u).item<double>(), 0);
  EXPECT_NEAR(kernels::geglu(u.flip(1)).item<double>(), -119.83801223620439, 1e-12);
  // Exact GELU, not its tanh approximation (which differs by 1e-4 here).
  EXPECT_NEAR(kernels::geglu(at::tensor({1.0, 1.0}, at::kDouble).view({1, 2})).item<double>(), 0.8413447460685429,
              1e-15);
}

TEST(Geglu, LeavesItsInputAlone) {
  const at::Tensor u = random({4, 10}, 1);
  const at::Tensor before = u.clone();
  (void)kernels::geglu(u);
  (void)kernels::geglu_backward(random({4, 5}, 2), u);
  EXPECT_TRUE(u.equal(before));
}

TEST(ScatterAddRows, AddsRepeatedRowsAndSkipsOneId) {
  const at::Tensor ids = at::tensor({3, 0, 3, 1, 0, 3, 4}, at::kLong);
  const at::Tensor rows = random({7, 6}, 1);
  const at::Tensor start = random({5, 6}, 2);
  at::Tensor expected = start.clone();
  for (std::int64_t i = 0; i < 7; ++i) {
    const auto id = ids[i].item<std::int64_t>();
    if (id != 0) expected[id].add_(rows[i]);
  }
  const at::Tensor grad = start.clone();
  kernels::scatter_add_rows(grad, ids, rows, 0);
  EXPECT_LE(relative_error(grad, expected), 1e-14);
  EXPECT_TRUE(grad[0].equal(start[0])) << "the skipped row changed";
  EXPECT_TRUE(grad[2].equal(start[2])) << "an unused row changed";
}

TEST(ScatterAddRows, SumsBf16RowsInFp32) {
  // 257 ones: a bf16 sum would stop at 256.
  const at::Tensor grad = at::zeros({3, 2});
  kernels::scatter_add_rows(grad, at::ones({257}, at::kLong), at::ones({257, 2}, at::kBFloat16), 0);
  EXPECT_EQ(grad[1][0].item<float>(), 257);
  EXPECT_EQ(grad[2][0].item<float>(), 0);
}

TEST(CrossEntropy, AgreesWithAutograd) {
  for (const double scale : {0.01, 1.0, 30.0}) {
    at::Tensor logits = random({11, 37}, 1, scale).requires_grad_();
    const at::Tensor labels = at::randint(0, 37, {11}, at::kLong);
    const at::Tensor loss = at::cross_entropy_loss(logits, labels, {}, at::Reduction::Sum);
    loss.backward();
    const at::Tensor work = logits.detach().clone();
    const kernels::CrossEntropy kept = kernels::cross_entropy_(work, labels, false);
    EXPECT_TRUE(work.equal(logits.detach())) << "logits changed without write_gradient";
    EXPECT_EQ(kept.correct.item<std::int64_t>(), logits.detach().argmax(1).eq(labels).sum().item<std::int64_t>());
    const kernels::CrossEntropy out = kernels::cross_entropy_(work, labels, true);
    EXPECT_NEAR(out.loss_sum.item<double>() / loss.item<double>(), 1, 1e-13);
    EXPECT_EQ(out.loss_sum.item<double>(), kept.loss_sum.item<double>());
    EXPECT_LE(relative_error(work, logits.grad()), 1e-13);
  }
}

TEST(CrossEntropy, LogitsOfTenThousandStayFinite) {
  for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kBFloat16}) {
    const at::Tensor logits = at::tensor({1e4, -1e4, 0.0, 1e4, 1e4, -1e4}, at::kDouble).view({2, 3}).to(type);
    const kernels::CrossEntropy out = kernels::cross_entropy_(logits, at::tensor({0, 2}, at::kLong), true);
    // Row 0: label has all the mass. Row 1: two equal winners, the label 2e4 below them (1e4 in bf16: 9984).
    const double top = at::scalar_tensor(1e4, at::kDouble).to(type).item<double>();
    EXPECT_NEAR(out.loss_sum.item<double>(), 2 * top + std::log(2.0), type == at::kDouble ? 1e-9 : 2e-3);
    const at::Tensor expected = at::tensor({0.0, 0.0, 0.0, 0.5, 0.5, -1.0}, at::kDouble).view({2, 3});
    EXPECT_LE(relative_error(logits, expected), 1e-3) << logits;
  }
}

TEST(CrossEntropy, ANearlyCertainAnswerKeepsItsGradientInBf16) {
  // p(label) = 1 - 4e-4 rounds to 1 in bf16. If p were rounded before 1 is taken off, the label's gradient would vanish
  // and the row's gradients would no longer sum to zero.
  const std::int64_t vocabulary = 5;
  const at::Tensor logits = at::zeros({1, vocabulary}, at::kBFloat16);
  logits[0][2].fill_(9.25);
  const at::Tensor exact = logits.to(at::kDouble);
  const double others = 4 * std::exp(-9.25) / (1 + 4 * std::exp(-9.25));
  const kernels::CrossEntropy out = kernels::cross_entropy_(logits, at::tensor({2}, at::kLong), true);
  EXPECT_NEAR(out.loss_sum.item<double>() / std::log1p(4 * std::exp(-9.25)), 1, 1e-3);  // fp32: 2^-24/3.8e-4
  EXPECT_NEAR(logits[0][2].item<double>() / -others, 1, 0.01);
  EXPECT_NEAR(logits[0][0].item<double>() / (others / 4), 1, 0.01);
  at::Tensor p = at::softmax(exact, -1);
  p[0][2].sub_(1);
  EXPECT_LE(norm_error(logits, p), 0x1p-8 + 1e-3);
}

TEST(CrossEntropy, ManyRowsInBlocksEqualOneByOne) {
  // More elements than one block of 2^23.
  const std::int64_t rows = 70, vocabulary = 250'000;
  at::Generator generator = at::detail::createCPUGenerator(5);
  const at::Tensor logits = at::randn({rows, vocabulary}, generator, at::kFloat);
  const at::Tensor labels = at::arange(rows, at::kLong) * 1000;
  double expected = 0;
  for (std::int64_t row = 0; row < rows; row += 23) {
    const at::Tensor one = logits.narrow(0, row, 1).clone();
    expected += kernels::cross_entropy_(one, labels.narrow(0, row, 1), false).loss_sum.item<double>();
  }
  const at::Tensor before = logits.clone();
  const double all = kernels::cross_entropy_(logits, labels, true).loss_sum.item<double>();
  double sum = 0;
  for (std::int64_t row = 0; row < rows; ++row) {
    const at::Tensor one = before.narrow(0, row, 1).clone();
    const double loss = kernels::cross_entropy_(one, labels.narrow(0, row, 1), true).loss_sum.item<double>();
    sum += loss;
    if (row % 23 == 0) expected -= loss;
    ASSERT_LE(relative_error(logits.narrow(0, row, 1), one), 1e-6) << row;
  }
  EXPECT_NEAR(all / sum, 1, 1e-6);
  EXPECT_NEAR(expected, 0, 1e-9);
}

}  // namespace
}  // namespace cram
