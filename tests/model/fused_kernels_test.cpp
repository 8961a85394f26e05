// Fused bf16 kernels against the compositions of ATen operators in fp64 on the same bf16 inputs: within the rounding of
// the result, at sizes that are no multiples of a vector, with the same bits for every number of threads.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cmath>

#include "base/check.h"
#include "model/kernels/avx512.h"
#include "model/kernels/backend.h"
#include "model/kernels/kernels.h"
#include "support/golden.h"

namespace cram::test {
namespace {

// Half a unit in the last place of bf16, relative to the value.
constexpr double kRounding = 0x1p-8;

#define CRAM_NEEDS_FUSED()              \
  if (!kernels::avx512::is_supported()) \
  GTEST_SKIP() << "this processor has no AVX512-BF16: only the compositions run here"

at::Tensor random_bf16(std::vector<std::int64_t> shape, std::uint64_t seed, double scale = 1) {
  return (at::randn(shape, at::detail::createCPUGenerator(seed), at::kFloat) * scale).to(at::kBFloat16);
}
at::Tensor random_float(std::vector<std::int64_t> shape, std::uint64_t seed) {
  return at::randn(shape, at::detail::createCPUGenerator(seed), at::kFloat);
}

// Every element within `units` roundings of its own size, or of the tensor's for sums that cancel.
void expect_close(const at::Tensor& found, const at::Tensor& expected, double units, const std::string& what) {
  ASSERT_EQ(found.sizes(), expected.sizes()) << what;
  if (found.numel() == 0) return;
  const at::Tensor f = found.to(at::kDouble), e = expected.to(at::kDouble);
  const double scale = e.abs().mean().item<double>();
  const at::Tensor allowed = (e.abs() + scale) * (units * kRounding);
  EXPECT_TRUE((f - e).abs().le(allowed).all().item<bool>())
      << what << ": worst " << ((f - e).abs() / allowed).max().item<double>() << " of what is allowed";
}

// The same call with one and with two threads.
template <class Call>
void expect_same_bits_for_threads(const Call& call, const std::string& what) {
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  const std::vector<at::Tensor> one = call();
  at::set_num_threads(2);
  const std::vector<at::Tensor> two = call();
  at::set_num_threads(before);
  for (std::size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(at::equal(one[i], two[i])) << what << ", result " << i;
}

// Compiled without OpenMP, at::parallel_for runs everything on the calling thread.
TEST(Threads, SharesWorkOut) {
  const int before = at::get_num_threads();
  at::set_num_threads(2);
  std::vector<int> seen(2, 0);
  at::parallel_for(0, 2, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) seen[static_cast<std::size_t>(i)] = at::get_thread_num();
  });
  at::set_num_threads(before);
  EXPECT_EQ(seen, (std::vector<int>{0, 1}));
}

TEST(Fused, IsUsedForContiguousBf16OnTheCpuOnly) {
  CRAM_NEEDS_FUSED();
  EXPECT_STREQ(kernels::backend_name(random_bf16({4, 32}, 1)), "cpu");
  EXPECT_STREQ(kernels::backend_name(random_bf16({4, 32}, 1).t()), "composed");
  EXPECT_STREQ(kernels::backend_name(random_float({4, 32}, 1)), "composed");
}

TEST(Fused, Geglu) {
  CRAM_NEEDS_FUSED();
  for (const auto& [rows, half] :
       {std::pair<std::int64_t, std::int64_t>{0, 8}, {1, 1}, {3, 15}, {5, 16}, {7, 100}, {300, 768}}) {
    const std::string what = std::to_string(rows) + "x" + std::to_string(half);
    for (const double scale : {1.0, 6.0}) {
      const at::Tensor u = random_bf16({rows, 2 * half}, 1, scale), d_out = random_bf16({rows, half}, 2);
      const at::Tensor wide = u.to(at::kDouble), d_wide = d_out.to(at::kDouble);
      expect_close(kernels::geglu(u), kernels::composed::geglu(wide), 1.01, "geglu " + what);
      expect_close(kernels::geglu_backward(d_out, u), kernels::composed::geglu_backward(d_wide, wide), 1.01,
                   "geglu_backward " + what);
      expect_same_bits_for_threads(
          [&] {
            return std::vector{kernels::geglu(u), kernels::geglu_backward(d_out, u)};
          },
          what);
    }
  }
  // Far out on both sides, and every bf16 value in between: no overflow, no jump.
  const at::Tensor gates = at::arange(-32768, 32768, at::kInt).to(at::kShort).view(at::kBFloat16);
  const at::Tensor finite = gates.masked_select(gates.abs().lt(1e4)).view({-1, 1});
  const at::Tensor u = at::cat({at::ones_like(finite), finite}, 1);
  EXPECT_TRUE(
      at::allclose(kernels::geglu(u).to(at::kDouble), kernels::composed::geglu(u.to(at::kDouble)), 0.004, 1e-6));
}

TEST(Fused, LayerNorm) {
  CRAM_NEEDS_FUSED();
  for (const auto& [rows, width] :
       {std::pair<std::int64_t, std::int64_t>{0, 16}, {1, 17}, {3, 16}, {129, 48}, {300, 768}}) {
    const std::string what = std::to_string(rows) + "x" + std::to_string(width);
    const at::Tensor x = random_bf16({rows, width}, 1) + 3, dy = random_bf16({rows, width}, 2);
    const at::Tensor branch = random_bf16({rows, width}, 5), residual = random_bf16({rows, width}, 6);
    const at::Tensor weight = random_float({width}, 3) + 1, bias = random_float({width}, 4);
    const auto wide = [](const at::Tensor& t) { return t.to(at::kDouble); };
    const auto out = kernels::layer_norm(x, weight, bias, 1e-12);
    const auto reference = kernels::composed::layer_norm(wide(x), wide(weight), wide(bias), 1e-12);
    expect_close(out.y, reference.y, 1.01, "layer_norm " + what);
    const at::Tensor summed = x.clone();
    const auto after_add = kernels::add_layer_norm_(summed, branch, weight, bias, 1e-12);
    EXPECT_TRUE(at::equal(summed, x + branch)) << what;
    expect_close(after_add.y, kernels::composed::layer_norm(wide(summed), wide(weight), wide(bias), 1e-12).y, 1.01,
                 what);
    if (rows % 3 == 0 && rows > 0) {  // a shorter branch is used again and again
      const at::Tensor few = branch.slice(0, 0, rows / 3), repeated = x.clone(), whole = x.clone();
      const auto short_add = kernels::add_layer_norm_(repeated, few, weight, bias, 1e-12);
      const auto long_add = kernels::add_layer_norm_(whole, few.repeat({3, 1}), weight, bias, 1e-12);
      EXPECT_TRUE(at::equal(repeated, whole) && at::equal(short_add.y, long_add.y)) << what;
    }
    for (const bool with_residual : {false, true}) {
      const at::Tensor beside = with_residual ? residual : at::Tensor();
      const at::Tensor weight_grad = at::ones({width}), bias_grad = at::ones({width});
      const at::Tensor dx = kernels::layer_norm_backward(dy, x, out, weight, bias, weight_grad, bias_grad, beside);
      const at::Tensor expected_weight = at::ones({width}, at::kDouble), expected_bias = at::ones({width}, at::kDouble);
      const at::Tensor expected = kernels::composed::layer_norm_backward(wide(dy), wide(x), reference, wide(weight),
                                                                         wide(bias), expected_weight, expected_bias,
                                                                         with_residual ? wide(residual) : at::Tensor());
      expect_close(dx, expected, 1.05, "layer_norm_backward " + what);
      if (rows == 0) continue;
      EXPECT_LE(norm_error(weight_grad, expected_weight), 1e-5) << what;
      EXPECT_LE(norm_error(bias_grad, expected_bias), 1e-5) << what;
    }
    expect_same_bits_for_threads(
        [&] {
          const at::Tensor w = at::zeros({width}), b = at::zeros({width});
          const at::Tensor dx = kernels::layer_norm_backward(dy, x, out, weight, bias, w, b, residual);
          return std::vector{kernels::layer_norm(x, weight, bias, 1e-12).y, dx, w, b};
        },
        what);
  }
}

TEST(Fused, Attention) {
  CRAM_NEEDS_FUSED();
  struct Size {
    std::int64_t batch, heads, seq, head_dim;
  };
  for (const Size& size :
       {Size{1, 1, 16, 16}, Size{2, 3, 32, 64}, Size{1, 2, 128, 64}, Size{2, 1, 48, 80}, Size{1, 1, 512, 128},
        Size{3, 2, 112, 32}, Size{2, 2, 66, 18}, Size{1, 3, 10, 6}, Size{1, 1, 2, 2}}) {
    const std::string what = std::to_string(size.seq) + " tokens, heads of " + std::to_string(size.head_dim);
    const kernels::AttentionSettings settings{.batch = size.batch, .heads = size.heads, .head_dim = size.head_dim};
    const at::Tensor qkv = random_bf16({size.batch * size.seq, 3 * size.heads * size.head_dim}, 1);
    const at::Tensor d_context = random_bf16({size.batch * size.seq, size.heads * size.head_dim}, 2);
    kernels::AttentionSaved saved, wide;
    const at::Tensor context = kernels::attention(qkv, settings, &saved);
    ASSERT_TRUE(saved.qkv.defined()) << "the composed version ran";
    const at::Tensor expected = kernels::composed::attention(qkv.to(at::kDouble), settings, &wide);
    const at::Tensor d_qkv = kernels::attention_backward(d_context, settings, saved);
    const at::Tensor expected_d = kernels::composed::attention_backward(d_context.to(at::kDouble), settings, wide);
    // Sums over bf16 probabilities: each is off by half a unit, the sum by less than all of them together.
    EXPECT_LE(norm_error(context, expected), 0.004) << what;
    EXPECT_LE(norm_error(d_qkv, expected_d), 0.006) << what;
    expect_close(context, expected, 3, "context " + what);
    // No worse than the composition in bf16.
    kernels::AttentionSaved rounded;
    const at::Tensor composed = kernels::composed::attention(qkv, settings, &rounded);
    EXPECT_LE(norm_error(context, expected), 1.05 * norm_error(composed, expected)) << what;
    EXPECT_LE(norm_error(d_qkv, expected_d),
              1.05 * norm_error(kernels::composed::attention_backward(d_context, settings, rounded), expected_d))
        << what;
    expect_same_bits_for_threads(
        [&] {
          kernels::AttentionSaved s;
          const at::Tensor c = kernels::attention(qkv, settings, &s);
          return std::vector{c, kernels::attention_backward(d_context, settings, s)};
        },
        what);
  }
  // A size that the kernel cannot do takes the composition, scores of 100 do not overflow.
  kernels::AttentionSaved odd;
  (void)kernels::attention(random_bf16({9, 3 * 16}, 1), {.head_dim = 16}, &odd);
  EXPECT_FALSE(odd.qkv.defined());
  const at::Tensor large = random_bf16({32, 3 * 16}, 1, 20);
  EXPECT_TRUE(kernels::attention(large, {.head_dim = 16}, nullptr).isfinite().all().item<bool>());
}

// Some queries alone, in any order, some rows without any: the same as all of them with the others' gradients zero.
TEST(Fused, AttentionOfPickedRows) {
  CRAM_NEEDS_FUSED();
  struct Size {
    std::int64_t batch, heads, seq, head_dim;
  };
  for (const Size& size : {Size{1, 1, 2, 2}, Size{3, 2, 66, 18}, Size{2, 3, 128, 64}, Size{2, 1, 9, 8}}) {
    const std::int64_t rows = size.batch * size.seq;
    const kernels::AttentionSettings settings{.batch = size.batch, .heads = size.heads, .head_dim = size.head_dim};
    const at::Tensor qkv = random_bf16({rows, 3 * size.heads * size.head_dim}, 1);
    const at::Tensor shuffled = at::randperm(rows, at::detail::createCPUGenerator(3), at::kLong);
    for (const std::int64_t count : {std::int64_t{0}, std::int64_t{1}, rows / 3 + 1, rows}) {
      // The last row of the batch has none unless all are picked.
      at::Tensor picks = shuffled.masked_select(shuffled.lt(rows - size.seq));
      picks = count == rows || picks.numel() == 0 ? shuffled.slice(0, 0, count) : picks.slice(0, 0, count);
      const std::string what = concat(size.batch, "x", size.seq, ", ", picks.numel(), " picked");
      const at::Tensor d_picked = random_bf16({picks.numel(), size.heads * size.head_dim}, 2);
      kernels::AttentionSaved saved, whole;
      const at::Tensor context = kernels::attention(qkv, settings, &saved, picks);
      const at::Tensor all = kernels::composed::attention(qkv.to(at::kDouble), settings, &whole);
      const at::Tensor expected = at::index_select(all, 0, picks);
      ASSERT_EQ(context.sizes(), expected.sizes()) << what;
      const at::Tensor d_qkv = kernels::attention_backward(d_picked, settings, saved);
      const at::Tensor expected_d = kernels::composed::attention_backward(
          kernels::put_rows(d_picked.to(at::kDouble), picks, rows), settings, whole);
      ASSERT_EQ(d_qkv.sizes(), expected_d.sizes()) << what;
      if (picks.numel() == 0) {
        EXPECT_EQ(d_qkv.abs().max().item<float>(), 0) << what;
        continue;
      }
      EXPECT_LE(norm_error(context, expected), 0.004) << what;
      EXPECT_LE(norm_error(d_qkv, expected_d), 0.008) << what;
      expect_same_bits_for_threads(
          [&] {
            kernels::AttentionSaved s;
            const at::Tensor c = kernels::attention(qkv, settings, &s, picks);
            return std::vector{c, kernels::attention_backward(d_picked, settings, s)};
          },
          what);
    }
  }
}

// Rows of several lengths, of all tokens and of picked ones: as the composition has it, and nothing of the padding.
TEST(Fused, AttentionWithPadding) {
  CRAM_NEEDS_FUSED();
  struct Size {
    std::int64_t heads, seq, head_dim;
    std::vector<std::int64_t> lengths;
  };
  for (const Size& size : {Size{2, 48, 16, {1, 5, 37, 48}}, Size{3, 128, 64, {128, 1, 127, 2, 64, 65}},
                           Size{1, 66, 18, {65, 3}}, Size{1, 2, 2, {1, 2}}, Size{2, 200, 32, {17, 130}}}) {
    const auto batch = static_cast<std::int64_t>(size.lengths.size());
    const std::int64_t rows = batch * size.seq, width = size.heads * size.head_dim;
    const std::string what = concat(size.seq, " tokens, heads of ", size.head_dim);
    const kernels::AttentionSettings settings{
        .batch = batch, .heads = size.heads, .head_dim = size.head_dim, .lengths = at::tensor(size.lengths, at::kLong)};
    const at::Tensor qkv = random_bf16({rows, 3 * width}, 1);
    // What is large in the padding would be seen.
    const at::Tensor is_token = at::arange(size.seq, at::kLong).unsqueeze(0).lt(settings.lengths.unsqueeze(1));
    const at::Tensor tokens = at::nonzero(is_token.view({-1})).view({-1});
    const at::Tensor padding = at::nonzero(is_token.view({-1}).logical_not()).view({-1});
    qkv.index_fill_(0, padding, 3);
    for (const bool picked : {false, true}) {
      // Some tokens of every row but the last.
      const at::Tensor picks =
          picked ? at::masked_select(tokens, tokens.remainder(3).eq(0).logical_and(tokens.lt(rows - size.seq)))
                 : at::Tensor();
      const at::Tensor d_rows = random_bf16({picked ? picks.numel() : rows, width}, 2);
      // As in training, padding has no gradient.
      if (!picked) d_rows.index_fill_(0, padding, 0);
      const auto rows_asked = [&](const at::Tensor& all) { return at::index_select(all, 0, picked ? picks : tokens); };
      kernels::AttentionSaved saved, wide;
      const at::Tensor context = kernels::attention(qkv, settings, &saved, picks);
      ASSERT_TRUE(saved.qkv.defined()) << "the composed version ran";
      const at::Tensor found = picked ? context : rows_asked(context);
      const at::Tensor expected = rows_asked(kernels::composed::attention(qkv.to(at::kDouble), settings, &wide));
      const at::Tensor d_wide = d_rows.to(at::kDouble);
      const at::Tensor d_qkv = kernels::attention_backward(d_rows, settings, saved);
      const at::Tensor expected_d = kernels::composed::attention_backward(
          picked ? kernels::put_rows(d_wide, picks, rows) : d_wide, settings, wide);
      EXPECT_TRUE(context.isfinite().all().item<bool>()) << what;
      EXPECT_LE(norm_error(found, expected), 0.004) << what;
      EXPECT_LE(norm_error(d_qkv, expected_d), 0.008) << what;
      EXPECT_EQ(at::index_select(d_qkv, 0, padding).abs().max().item<float>(), 0) << what;
      // The same bits whatever stands in the padding, and for every number of threads.
      const auto call = [&](const at::Tensor& input) {
        kernels::AttentionSaved s;
        const at::Tensor c = kernels::attention(input, settings, &s, picks);
        return std::vector{picked ? c : rows_asked(c), kernels::attention_backward(d_rows, settings, s)};
      };
      const std::vector<at::Tensor> other = call(qkv.index_fill(0, padding, -7));
      EXPECT_TRUE(at::equal(other[0], found) && at::equal(other[1], d_qkv)) << what;
      expect_same_bits_for_threads([&] { return call(qkv); }, what);
      // The negative control: full rows are something else (but for a single key, which may weigh nothing).
      if (size.seq == 2) continue;
      kernels::AttentionSettings full = settings;
      full.lengths = at::Tensor();
      const at::Tensor ignored = kernels::attention(qkv, full, nullptr, picks);
      EXPECT_GE(norm_error(picked ? ignored : rows_asked(ignored), expected), 0.1) << what;
    }
  }
}

TEST(Fused, CrossEntropy) {
  CRAM_NEEDS_FUSED();
  for (const auto& [rows, width] :
       {std::pair<std::int64_t, std::int64_t>{0, 40}, {1, 7}, {5, 101}, {33, 4096}, {3, 32768}}) {
    const std::string what = std::to_string(rows) + "x" + std::to_string(width);
    const at::Tensor labels = at::arange(rows, at::kLong).mul_(7).remainder_(width);
    for (const double scale : {0.1, 3.0, 300.0}) {
      const at::Tensor logits = random_bf16({rows, width}, 1, scale);
      const at::Tensor wide = logits.to(at::kDouble);
      const kernels::CrossEntropy counted = kernels::cross_entropy_(logits.clone(), labels, false);
      const kernels::CrossEntropy expected_count = kernels::composed::cross_entropy_(wide.clone(), labels, false);
      EXPECT_TRUE(at::equal(counted.correct, kernels::composed::cross_entropy_(logits.clone(), labels, false).correct));
      EXPECT_TRUE(at::allclose(counted.loss_sum, expected_count.loss_sum, 1e-6, 1e-6)) << what;
      const at::Tensor gradient = logits.clone(), expected = wide.clone();
      const kernels::CrossEntropy loss = kernels::cross_entropy_(gradient, labels, true);
      (void)kernels::composed::cross_entropy_(expected, labels, true);
      EXPECT_TRUE(at::equal(loss.loss_sum, counted.loss_sum)) << what;
      EXPECT_TRUE(at::allclose(gradient.to(at::kDouble), expected, 0.004, 1e-12)) << what << ", scale " << scale;
    }
  }
  // A label that is all but certain: p - 1 must not be lost in rounding.
  const at::Tensor sure = at::zeros({1, 64}, at::kBFloat16);
  sure[0][9].fill_(20);
  const at::Tensor exact = sure.to(at::kDouble);
  const at::Tensor label = at::full({1}, 9, at::kLong);
  (void)kernels::cross_entropy_(sure, label, true);
  (void)kernels::composed::cross_entropy_(exact, label, true);
  EXPECT_NEAR(sure[0][9].item<double>() / exact[0][9].item<double>(), 1, 0.004);
}

TEST(Fused, ScatterAddRows) {
  CRAM_NEEDS_FUSED();
  for (const auto& [rows, width] : {std::pair<std::int64_t, std::int64_t>{0, 16}, {1, 5}, {50, 48}, {333, 200}}) {
    const at::Tensor d_rows = random_bf16({rows, width}, 1);
    const at::Tensor ids = at::arange(rows, at::kLong).mul_(5).remainder_(17).sub_(1);  // many twice, some -1
    const at::Tensor found = at::ones({20, width}), expected = at::ones({20, width}, at::kDouble);
    kernels::scatter_add_rows(found, ids, d_rows, -1);
    for (std::int64_t r = 0; r < rows; ++r) {
      const auto id = ids[r].item<std::int64_t>();
      if (id >= 0) expected[id].add_(d_rows[r].to(at::kDouble));
    }
    EXPECT_LE(norm_error(found, expected), 1e-6) << rows << "x" << width;
    expect_same_bits_for_threads(
        [&] {
          const at::Tensor sums = at::zeros({20, width});
          kernels::scatter_add_rows(sums, ids, d_rows, -1);
          return std::vector{sums};
        },
        "scatter_add_rows");
  }
}

TEST(Fused, WeightGradientIsSummedInFp32) {
  CRAM_NEEDS_FUSED();
  struct Size {
    std::int64_t tokens, out, in;
  };
  for (const Size& size : {Size{0, 16, 16}, Size{2, 2, 16}, Size{6, 10, 48}, Size{130, 98, 80}, Size{2050, 150, 64},
                           Size{96, 52, 208}, Size{64, 4096, 256}, Size{3, 16, 16}, Size{8, 16, 20}}) {
    const std::string what = concat(size.tokens, " x ", size.out, " x ", size.in);
    const at::Tensor dy = random_bf16({size.tokens, size.out}, 1), x = random_bf16({size.tokens, size.in}, 2);
    const at::Tensor sum = at::ones({size.out, size.in}), before = sum.to(at::kDouble);
    kernels::add_transposed_product_(sum, dy, x);
    const at::Tensor expected = before + at::mm(dy.to(at::kDouble).t(), x.to(at::kDouble));
    // The last two sizes take ATen's product, which is rounded to bf16.
    const bool rounded = size.tokens == 3 || size.in == 20;
    EXPECT_LE(norm_error(sum, expected), rounded ? 4e-3 : 1e-6) << what;
    expect_same_bits_for_threads(
        [&] {
          const at::Tensor s = at::zeros({size.out, size.in});
          kernels::add_transposed_product_(s, dy, x);
          return std::vector{s};
        },
        what);
  }
}

TEST(Fused, AddTo) {
  CRAM_NEEDS_FUSED();
  for (const std::int64_t count : {0, 1, 17, 100'000}) {
    const at::Tensor sum = random_float({count}, 1), x = random_bf16({count}, 2);
    const at::Tensor expected = sum + x;
    kernels::add_to_(sum, x);
    EXPECT_TRUE(at::equal(sum, expected)) << count;
  }
}

}  // namespace
}  // namespace cram::test
