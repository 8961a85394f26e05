// CUDA kernels against the compositions of ATen operators in fp64 on the CPU, on the same inputs: within the rounding
// of the result, at sizes that are no multiples of a vector, with the same bits twice. Skipped where no GPU is visible.
#include <ATen/Context.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cmath>

#include "base/check.h"
#include "model/kernels/backend.h"
#include "support/deterministic.h"
#include "support/golden.h"

namespace cram::test {
namespace {

#define CRAM_NEEDS_GPU() \
  if (!at::hasCUDA()) GTEST_SKIP() << "no GPU is visible to this process (or the build has no CUDA)"

const at::Device kGpu(at::kCUDA, 0);

// Half a unit in the last place, relative to the value; fp32 kernels do a few operations.
double rounding_of(at::ScalarType type) { return type == at::kBFloat16 ? 0x1p-8 : 0x1p-19; }

at::Tensor random(std::vector<std::int64_t> shape, at::ScalarType type, std::uint64_t seed, double scale = 1) {
  return (at::randn(shape, at::detail::createCPUGenerator(seed), at::kFloat) * scale).to(type);
}
at::Tensor wide(const at::Tensor& x) { return x.defined() ? x.cpu().to(at::kDouble) : x; }
at::Tensor on_gpu(const at::Tensor& x) { return x.to(kGpu); }

// Every element within `units` roundings of its own size, or of the tensor's for sums that cancel.
void expect_close(const at::Tensor& found, const at::Tensor& expected, double units, const std::string& what) {
  ASSERT_EQ(found.sizes(), expected.sizes()) << what;
  ASSERT_TRUE(found.is_cuda()) << what;
  if (found.numel() == 0) return;
  const at::Tensor f = wide(found), e = wide(expected);
  const at::Tensor allowed = (e.abs() + e.abs().mean()) * (units * rounding_of(found.scalar_type()));
  EXPECT_TRUE((f - e).abs().le(allowed).all().item<bool>())
      << what << ": worst " << ((f - e).abs() / allowed).max().item<double>() << " of what is allowed";
}

template <class Call>
void expect_same_bits_twice(const Call& call, const std::string& what) {
  const std::vector<at::Tensor> one = call(), two = call();
  for (std::size_t i = 0; i < one.size(); ++i) EXPECT_TRUE(at::equal(one[i], two[i])) << what << ", result " << i;
}

std::string text_of(at::ScalarType type, std::int64_t rows, std::int64_t width) {
  return concat(type == at::kBFloat16 ? "bf16 " : "fp32 ", rows, "x", width);
}

constexpr at::ScalarType kTypes[] = {at::kBFloat16, at::kFloat};

TEST(Cuda, TakesBf16AndFp32OnAGpu) {
  CRAM_NEEDS_GPU();
  EXPECT_STREQ(kernels::backend_name(on_gpu(random({4, 32}, at::kBFloat16, 1))), "cuda");
  EXPECT_STREQ(kernels::backend_name(on_gpu(random({4, 32}, at::kFloat, 1))), "cuda");
  EXPECT_STREQ(kernels::backend_name(on_gpu(random({4, 32}, at::kBFloat16, 1)).t()), "composed");
  EXPECT_STREQ(kernels::backend_name(on_gpu(random({4, 32}, at::kDouble, 1))), "composed");
}

TEST(Cuda, Geglu) {
  CRAM_NEEDS_GPU();
  for (const at::ScalarType type : kTypes) {
    for (const auto& [rows, half] : {std::pair<std::int64_t, std::int64_t>{0, 8},
                                     {3, 0},
                                     {1, 1},
                                     {3, 15},
                                     {5, 16},
                                     {7, 100},
                                     {300, 1536},
                                     {2, 4096}}) {
      const std::string what = text_of(type, rows, half);
      for (const double scale : {1.0, 6.0}) {
        const at::Tensor u = random({rows, 2 * half}, type, 1, scale), d_out = random({rows, half}, type, 2);
        const at::Tensor gu = on_gpu(u), gd = on_gpu(d_out);
        expect_close(kernels::geglu(gu), kernels::composed::geglu(wide(u)), 1.05, "geglu " + what);
        expect_close(kernels::geglu_backward(gd, gu), kernels::composed::geglu_backward(wide(d_out), wide(u)), 1.05,
                     "geglu_backward " + what);
        expect_same_bits_twice([&] { return std::vector{kernels::geglu(gu), kernels::geglu_backward(gd, gu)}; }, what);
      }
    }
  }
}

TEST(Cuda, GegluOfRowsThatAreNotAligned) {
  CRAM_NEEDS_GPU();
  const at::Tensor all = random({33 * 64 + 1}, at::kBFloat16, 1);
  const at::Tensor u = on_gpu(all).narrow(0, 1, 33 * 64).view({33, 64});
  expect_close(kernels::geglu(u), kernels::composed::geglu(wide(u)), 1.05, "geglu, two bytes off");
}

TEST(Cuda, LayerNorm) {
  CRAM_NEEDS_GPU();
  for (const at::ScalarType type : kTypes) {
    for (const auto& [rows, width] : {std::pair<std::int64_t, std::int64_t>{0, 16},
                                      {1, 1},
                                      {1, 17},
                                      {3, 16},
                                      {129, 48},
                                      {300, 768},
                                      {1030, 1000}}) {
      const std::string what = text_of(type, rows, width);
      const at::Tensor x = random({rows, width}, type, 1) + 3, dy = random({rows, width}, type, 2);
      const at::Tensor branch = random({rows, width}, type, 5), residual = random({rows, width}, type, 6);
      const at::Tensor weight = random({width}, at::kFloat, 3) + 1, bias = random({width}, at::kFloat, 4);
      const at::Tensor gx = on_gpu(x), gw = on_gpu(weight), gb = on_gpu(bias);
      const auto out = kernels::layer_norm(gx, gw, gb, 1e-12);
      const auto reference = kernels::composed::layer_norm(wide(x), wide(weight), wide(bias), 1e-12);
      // A single column is all rounding: its variance is zero and eps as good as that.
      if (width > 1) expect_close(out.y, reference.y, 1.2, "layer_norm " + what);
      const at::Tensor summed = gx.clone();
      const auto after_add = kernels::add_layer_norm_(summed, on_gpu(branch), gw, gb, 1e-12);
      EXPECT_TRUE(at::equal(summed.cpu(), x + branch)) << what;
      if (width > 1) {
        expect_close(after_add.y, kernels::composed::layer_norm(wide(summed), wide(weight), wide(bias), 1e-12).y, 1.2,
                     "add_layer_norm_ " + what);
      }
      if (rows % 3 == 0 && rows > 0) {  // a shorter branch is used again and again
        const at::Tensor few = on_gpu(branch.slice(0, 0, rows / 3).contiguous()), repeated = gx.clone(),
                         whole = gx.clone();
        const auto short_add = kernels::add_layer_norm_(repeated, few, gw, gb, 1e-12);
        const auto long_add = kernels::add_layer_norm_(whole, few.repeat({3, 1}), gw, gb, 1e-12);
        EXPECT_TRUE(at::equal(repeated, whole) && at::equal(short_add.y, long_add.y)) << what;
      }
      if (rows == 0 || width == 1) continue;
      for (const bool with_residual : {false, true}) {
        const at::Tensor beside = with_residual ? residual : at::Tensor();
        const at::Tensor dw = at::ones({width}, gw.options()), db = at::ones({width}, gw.options());
        const at::Tensor dx = kernels::layer_norm_backward(on_gpu(dy), gx, out, gw, gb, dw, db,
                                                           with_residual ? on_gpu(beside) : at::Tensor());
        const at::Tensor expected_dw = at::ones({width}, at::kDouble), expected_db = at::ones({width}, at::kDouble);
        const at::Tensor expected = kernels::composed::layer_norm_backward(
            wide(dy), wide(x), reference, wide(weight), wide(bias), expected_dw, expected_db, wide(beside));
        expect_close(dx, expected, 2, "layer_norm_backward " + what);
        EXPECT_LE(norm_error(dw.cpu(), expected_dw), 1e-5) << what;
        EXPECT_LE(norm_error(db.cpu(), expected_db), 1e-5) << what;
      }
      expect_same_bits_twice(
          [&] {
            const at::Tensor dw = at::zeros({width}, gw.options()), db = at::zeros({width}, gw.options());
            const at::Tensor dx = kernels::layer_norm_backward(on_gpu(dy), gx, out, gw, gb, dw, db, on_gpu(residual));
            return std::vector{kernels::layer_norm(gx, gw, gb, 1e-12).y, dx, dw, db};
          },
          what);
    }
  }
}

TEST(Cuda, CrossEntropy) {
  CRAM_NEEDS_GPU();
  for (const at::ScalarType type : kTypes) {
    for (const auto& [rows, width] :
         {std::pair<std::int64_t, std::int64_t>{0, 40}, {2, 1}, {1, 7}, {5, 101}, {33, 4096}, {3, 32768}, {4, 32771}}) {
      const at::Tensor labels = at::arange(rows, at::kLong).mul_(7).remainder_(width);
      for (const double scale : {0.1, 3.0, 300.0}) {
        const std::string what = text_of(type, rows, width) + concat(", scale ", scale);
        const at::Tensor logits = random({rows, width}, type, 1, scale), gl = on_gpu(logits), glabels = on_gpu(labels);
        const at::Tensor kept = gl.clone();
        const kernels::CrossEntropy counted = kernels::cross_entropy_(kept, glabels, false);
        const kernels::CrossEntropy expected_count = kernels::composed::cross_entropy_(wide(logits), labels, false);
        EXPECT_TRUE(at::equal(kept, gl)) << what;
        EXPECT_EQ(counted.correct.item<std::int64_t>(), expected_count.correct.item<std::int64_t>()) << what;
        EXPECT_TRUE(at::allclose(counted.loss_sum.cpu(), expected_count.loss_sum, 1e-6, 1e-6)) << what;
        const at::Tensor gradient = gl.clone(), expected = wide(logits);
        const kernels::CrossEntropy loss = kernels::cross_entropy_(gradient, glabels, true);
        (void)kernels::composed::cross_entropy_(expected, labels, true);
        EXPECT_TRUE(at::equal(loss.loss_sum, counted.loss_sum)) << what;
        EXPECT_TRUE(at::allclose(wide(gradient), expected, type == at::kBFloat16 ? 0.004 : 1e-4, 1e-12)) << what;
        expect_same_bits_twice(
            [&] {
              const at::Tensor g = gl.clone();
              const at::Tensor sum = kernels::cross_entropy_(g, glabels, true).loss_sum;
              return std::vector{g, sum};
            },
            what);
      }
    }
    // A label that is all but certain: p - 1 and the loss must not be lost in rounding.
    const at::Tensor sure = at::zeros({1, 64}, type);
    sure[0][9].fill_(20);
    const at::Tensor exact = wide(sure), label = at::full({1}, 9, at::kLong), found = on_gpu(sure);
    const double loss = kernels::cross_entropy_(found, on_gpu(label), true).loss_sum.item<double>();
    const double expected = kernels::composed::cross_entropy_(exact, label, true).loss_sum.item<double>();
    EXPECT_NEAR(loss / expected, 1, 1e-5);
    EXPECT_NEAR(found[0][9].item<double>() / exact[0][9].item<double>(), 1, 0.004);
  }
  // Equal logits: the first wins.
  const at::Tensor tie = on_gpu(at::zeros({2, 16}, at::kBFloat16));
  EXPECT_EQ(kernels::cross_entropy_(tie, on_gpu(at::tensor({0, 1}, at::kLong)), false).correct.item<std::int64_t>(), 1);
}

TEST(Cuda, ScatterAddRows) {
  CRAM_NEEDS_GPU();
  for (const at::ScalarType type : kTypes) {
    for (const auto& [rows, width] : {std::pair<std::int64_t, std::int64_t>{0, 16},
                                      {1, 5},
                                      {31, 8},
                                      {32, 8},
                                      {33, 8},
                                      {50, 48},
                                      {333, 200},
                                      {5000, 768}}) {
      // All different, many twice and some -1, and one id for nearly all: runs over many pieces.
      for (const std::int64_t kind : {0, 1, 2}) {
        at::Tensor ids = at::arange(rows, at::kLong);
        if (kind == 1) ids = ids.mul(5).remainder(17).sub(1);
        if (kind == 2) ids = at::where(ids.remainder(50).eq(7), ids, at::full_like(ids, 4));
        const std::string what = text_of(type, rows, width) + concat(", kind ", kind);
        const at::Tensor d_rows = random({rows, width}, type, 1);
        const at::Tensor start = random({5000, width}, at::kFloat, 2);
        const at::Tensor found = on_gpu(start), expected = wide(start);
        kernels::scatter_add_rows(found, on_gpu(ids), on_gpu(d_rows), -1);
        expected.index_add_(0, ids.clamp_min(0), wide(d_rows) * ids.ge(0).unsqueeze(1));
        EXPECT_LE(norm_error(found.cpu(), expected), 1e-6) << what;
        EXPECT_LE(relative_error(found.cpu(), expected), 1e-4) << what;
        expect_same_bits_twice(
            [&] {
              const at::Tensor sums = on_gpu(start);
              kernels::scatter_add_rows(sums, on_gpu(ids), on_gpu(d_rows), -1);
              return std::vector{sums};
            },
            what);
      }
    }
  }
}

TEST(Cuda, AddTo) {
  CRAM_NEEDS_GPU();
  for (const at::ScalarType type : kTypes) {
    for (const std::int64_t count : {0, 1, 17, 100'003, 5'000'000}) {
      const at::Tensor sum = random({count}, at::kFloat, 1), x = random({count}, type, 2), found = on_gpu(sum);
      kernels::add_to_(found, on_gpu(x));
      EXPECT_TRUE(at::equal(found.cpu(), sum + x)) << count;
    }
  }
}

TEST(Cuda, Attention) {
  CRAM_NEEDS_GPU();
  struct Size {
    std::int64_t batch, heads, seq, head_dim;
  };
  const Deterministic deterministic;
  for (const Size& size : {Size{1, 1, 1, 8}, Size{1, 1, 16, 16}, Size{2, 3, 33, 64}, Size{4, 12, 128, 64},
                           Size{2, 1, 48, 80}, Size{1, 1, 512, 128}, Size{3, 2, 10, 20}}) {
    const std::string what = concat(size.seq, " tokens, heads of ", size.head_dim);
    const kernels::AttentionSettings settings{.batch = size.batch, .heads = size.heads, .head_dim = size.head_dim};
    const at::Tensor qkv = random({size.batch * size.seq, 3 * size.heads * size.head_dim}, at::kBFloat16, 1);
    const at::Tensor d_context = random({size.batch * size.seq, size.heads * size.head_dim}, at::kBFloat16, 2);
    kernels::AttentionSaved saved, exact;
    const at::Tensor context = kernels::attention(on_gpu(qkv), settings, &saved);
    EXPECT_EQ(saved.qkv.defined(), size.head_dim % 8 == 0) << what << ": which version ran";
    const at::Tensor d_qkv = kernels::attention_backward(on_gpu(d_context), settings, saved);
    const at::Tensor expected = kernels::composed::attention(wide(qkv), settings, &exact);
    const at::Tensor expected_d = kernels::composed::attention_backward(wide(d_context), settings, exact);
    ASSERT_EQ(context.sizes(), expected.sizes());
    ASSERT_EQ(d_qkv.sizes(), expected_d.sizes());
    EXPECT_LE(norm_error(context.cpu(), expected), 0.006) << what;
    EXPECT_LE(norm_error(d_qkv.cpu(), expected_d), 0.012) << what;
    EXPECT_LE(norm_error(kernels::attention(on_gpu(qkv), settings, nullptr).cpu(), expected), 0.006);
    expect_same_bits_twice(
        [&] {
          kernels::AttentionSaved s;
          const at::Tensor c = kernels::attention(on_gpu(qkv), settings, &s);
          return std::vector{c, kernels::attention_backward(on_gpu(d_context), settings, s)};
        },
        what);
  }
}

TEST(Cuda, Products) {
  CRAM_NEEDS_GPU();
  struct Size {
    std::int64_t tokens, out, in;
  };
  for (const at::ScalarType type : kTypes) {
    for (const Size& size : {Size{0, 16, 16}, Size{1, 1, 1}, Size{6, 10, 48}, Size{131, 97, 83}, Size{256, 768, 3072},
                             Size{2050, 152, 64}, Size{64, 4096, 256}}) {
      const std::string what = text_of(type, size.tokens, size.out) + concat(" in ", size.in);
      const at::Tensor dy = random({size.tokens, size.out}, type, 1), x = random({size.tokens, size.in}, type, 2);
      const at::Tensor weight = random({size.out, size.in}, type, 3);
      const at::Tensor gdy = on_gpu(dy), gx = on_gpu(x), gw = on_gpu(weight);
      const double tolerance = type == at::kBFloat16 ? 0x1p-8 : 1e-5;
      kernels::WeightPanels panels;  // the CPU's
      const auto expect = [&](const at::Tensor& found, const at::Tensor& expected, double allowed, const char* name) {
        ASSERT_EQ(found.sizes(), expected.sizes()) << name << " " << what;
        EXPECT_LE(norm_error(found.cpu(), expected), allowed) << name << " " << what;
      };
      expect(kernels::product_transposed(gx, gw, panels), at::mm(wide(x), wide(weight).t()), tolerance,
             "product_transposed");
      expect(kernels::product(gdy, gw, panels), at::mm(wide(dy), wide(weight)), tolerance, "product");
      const at::Tensor sum = at::ones({size.out, size.in}, gw.options().dtype(at::kFloat));
      kernels::add_transposed_product_(sum, gdy, gx);
      // Summed in fp32 and added to the gradient without a rounded product between.
      expect(sum, 1 + at::mm(wide(dy).t(), wide(x)), 1e-5, "add_transposed_product_");
      expect_same_bits_twice(
          [&] {
            const at::Tensor s = at::zeros({size.out, size.in}, gw.options().dtype(at::kFloat));
            kernels::add_transposed_product_(s, gdy, gx);
            return std::vector{s, kernels::product_transposed(gx, gw, panels), kernels::product(gdy, gw, panels)};
          },
          what);
    }
  }
}

// The CPU's loops give the same bits.
TEST(Cuda, AdamWAndTheGradientNorm) {
  CRAM_NEEDS_GPU();
  for (const bool rounds : {false, true}) {
    std::vector<kernels::AdamWPiece> on_cpu, on_device;
    for (std::int64_t i = 0; i < 30; ++i) {  // more than one launch takes
      const std::int64_t count = i == 0 ? 0 : i == 1 ? 1 : i == 2 ? 300'007 : 64 * i;
      const auto seed = static_cast<std::uint64_t>(10 * i);
      const kernels::AdamWStep step{.lr = 1e-2, .weight_decay = i % 2 == 0 ? 0.1 : 0, .grad_scale = 0.01, .step = 3};
      kernels::AdamWPiece cpu{random({count}, at::kFloat, seed + 1),
                              random({count}, at::kFloat, seed + 2, 100),
                              random({count}, at::kFloat, seed + 3),
                              random({count}, at::kFloat, seed + 4).abs(),
                              rounds ? at::zeros({count}, at::kBFloat16) : at::Tensor(),
                              step};
      on_device.push_back({on_gpu(cpu.master), on_gpu(cpu.grad), on_gpu(cpu.exp_avg), on_gpu(cpu.exp_avg_sq),
                           rounds ? on_gpu(cpu.working) : at::Tensor(), step});
      on_cpu.push_back(cpu);
    }
    for (std::size_t i = 0; i < on_cpu.size(); ++i) {
      const at::Tensor& grad = on_device[i].grad;
      const double found = kernels::sum_of_squares(grad).item<double>();
      EXPECT_NEAR(found, wide(grad).square().sum().item<double>(), 1e-10 * found);
      EXPECT_EQ(found, kernels::sum_of_squares(grad).item<double>());
    }
    kernels::adamw_(on_cpu);
    kernels::adamw_(on_device);
    for (std::size_t i = 0; i < on_cpu.size(); ++i) {
      EXPECT_TRUE(at::equal(on_device[i].master.cpu(), on_cpu[i].master)) << "master " << i;
      EXPECT_TRUE(at::equal(on_device[i].exp_avg.cpu(), on_cpu[i].exp_avg)) << "exp_avg " << i;
      EXPECT_TRUE(at::equal(on_device[i].exp_avg_sq.cpu(), on_cpu[i].exp_avg_sq)) << "exp_avg_sq " << i;
      EXPECT_TRUE(at::equal(on_device[i].grad.cpu(), at::zeros_like(on_cpu[i].grad))) << "grad " << i;
      if (rounds) {
        EXPECT_TRUE(at::equal(on_device[i].working.cpu(), on_cpu[i].working)) << "working " << i;
      }
    }
  }
}

// A whole model: gradients of bf16 on the GPU against fp64 on the CPU.
TEST(Cuda, GradientsOfAModel) {
  CRAM_NEEDS_GPU();
  const ModelConfig config = model_of(2, 64, 2, 96, 101, 16);
  const at::Tensor ids = at::arange(4 * 16).mul(7).remainder(96).add(5).view({4, 16});
  const at::Tensor positions = at::arange(0, 64, 4), labels = positions.remainder(90).add(5);
  Model exact(config, Precision::kFp64);
  const double expected = exact.forward_backward(ids, positions, labels).item<double>();
  for (const Precision precision : {Precision::kBf16, Precision::kFp32}) {
    ParameterStore store;
    cram::Model model(config, store);
    store.allocate(precision, kGpu, adam_states());
    store.initialize(0);
    const double loss =
        forward_backward(model, batch_of(on_gpu(ids), on_gpu(positions), on_gpu(labels))).item<double>();
    EXPECT_NEAR(loss / expected, 1, precision == Precision::kBf16 ? 0.01 : 1e-5);
    for (ParamId id = 0; id < store.size(); ++id) {
      EXPECT_LE(norm_error(store.grad(id).cpu(), exact.store.grad(id)), precision == Precision::kBf16 ? 0.05 : 1e-4)
          << store.spec(id).name;
    }
  }
}

}  // namespace
}  // namespace cram::test
