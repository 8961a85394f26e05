// The CUDA kernels' own source, compiled for the host (tests/support/emulated_cuda): their results against fp64, in
// both orders of threads and blocks, with scratch memory full of NaN, at sizes that are no multiples of a vector and at
// addresses that are not aligned. cuda_kernels_test.cpp asks the same of a GPU.
#include <cuda_bf16.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numbers>
#include <numeric>
#include <random>
#include <vector>

#include "model/kernels/cuda/launch.h"

namespace cram::kernels::cuda::launch {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// A tensor of either format in memory that is aligned, or `offset` elements past that.
class Buffer {
 public:
  Buffer(Element element, std::int64_t count, std::int64_t offset = 0)
      : bf16_(element == Element::kBf16), count_(count), offset_(offset * (bf16_ ? 2 : 4)), memory_(bytes()) {}

  [[nodiscard]] void* data() {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    return memory_.data() + (64 - address % 64) + static_cast<std::size_t>(offset_);
  }
  [[nodiscard]] float* floats() { return static_cast<float*>(data()); }
  [[nodiscard]] std::int64_t size() const { return count_; }
  void set(std::int64_t i, double value) {
    if (bf16_) {
      const unsigned short bits = __float2bfloat16_rn(static_cast<float>(value)).bits;
      std::memcpy(static_cast<char*>(data()) + 2 * i, &bits, 2);
    } else {
      floats()[i] = static_cast<float>(value);
    }
  }
  [[nodiscard]] double get(std::int64_t i) {
    if (!bf16_) return floats()[i];
    unsigned short bits = 0;
    std::memcpy(&bits, static_cast<char*>(data()) + 2 * i, 2);
    return __uint_as_float(static_cast<unsigned>(bits) << 16);
  }
  Buffer& fill(double value) {
    for (std::int64_t i = 0; i < count_; ++i) set(i, value);
    return *this;
  }
  Buffer& random(unsigned seed, double scale = 1, double mean = 0) {
    std::mt19937 source(seed);
    std::normal_distribution<double> normal(mean, scale);
    for (std::int64_t i = 0; i < count_; ++i) set(i, normal(source));
    return *this;
  }

 private:
  [[nodiscard]] std::size_t bytes() const { return static_cast<std::size_t>(4 * count_ + offset_ + 128); }
  bool bf16_;
  std::int64_t count_, offset_;
  std::vector<char> memory_;
};

// Half a unit in the last place of bf16; a few of fp32.
double rounding_of(Element element) { return element == Element::kBf16 ? 1.05 / 256 : 4e-6; }

// ASSERT stops the test at the first element that is off.
#define CRAM_EXPECT_CLOSE(found, expected, scale, tolerance)                                                  \
  do {                                                                                                        \
    const double f = (found), e = (expected);                                                                 \
    ASSERT_LE(std::abs(f - e), (std::abs(e) + (scale)) * (tolerance)) << "found " << f << ", expected " << e; \
  } while (false)

struct Size {
  std::int64_t rows, width;
};

class Emulated : public ::testing::TestWithParam<std::tuple<Element, bool>> {
 protected:
  void SetUp() override { emulated_cuda::reverse(std::get<1>(GetParam())); }
  void TearDown() override { emulated_cuda::reverse(false); }
  const Element element = std::get<0>(GetParam());
};

TEST_P(Emulated, Geglu) {
  const double tolerance = rounding_of(element);
  for (const auto& [rows, half] : {Size{0, 8}, {3, 0}, {1, 1}, {3, 15}, {5, 16}, {7, 104}, {3, 1536}, {2, 4096}}) {
    for (const std::int64_t offset : {0, 1}) {
      SCOPED_TRACE(std::to_string(rows) + "x" + std::to_string(half));
      Buffer u(element, rows * 2 * half, offset), out(element, rows * half), d(element, rows * half),
          du(element, rows * 2 * half);
      u.random(1, 2), d.random(2);
      geglu(element, u.data(), out.data(), rows, half, nullptr);
      geglu_backward(element, d.data(), u.data(), du.data(), rows, half, nullptr);
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t c = 0; c < half; ++c) {
          const std::int64_t at = r * 2 * half + c;
          const double value = u.get(at), gate = u.get(at + half), dy = d.get(r * half + c);
          const double cdf = 0.5 * std::erfc(-gate / std::numbers::sqrt2);
          const double density = std::exp(-gate * gate / 2) / std::sqrt(2 * std::numbers::pi);
          CRAM_EXPECT_CLOSE(out.get(r * half + c), value * gate * cdf, 1, tolerance);
          CRAM_EXPECT_CLOSE(du.get(at), dy * gate * cdf, 1, tolerance);
          CRAM_EXPECT_CLOSE(du.get(at + half), dy * value * (cdf + gate * density), 1, tolerance);
        }
      }
    }
  }
}

TEST_P(Emulated, LayerNorm) {
  const double tolerance = rounding_of(element);
  for (const auto& [rows, width] : {Size{0, 16}, {1, 17}, {3, 16}, {5, 66}, {129, 48}, {260, 768}}) {
    for (const bool adds : {false, true}) {
      SCOPED_TRACE(std::to_string(rows) + "x" + std::to_string(width));
      const std::int64_t all = rows * width;
      Buffer x(element, all), branch(element, all), y(element, all), dy(element, all), dx(element, all);
      Buffer residual(element, all), weight(Element::kFloat, width), bias(Element::kFloat, width);
      Buffer mean(Element::kFloat, rows), rstd(Element::kFloat, rows);
      Buffer dw(Element::kFloat, width), db(Element::kFloat, width);
      Buffer partial(Element::kFloat, layer_norm_partial_size(rows, width));
      x.random(1, 1, 3), branch.random(2), dy.random(3), residual.random(4), weight.random(5, 1, 1), bias.random(6);
      dw.fill(1), db.fill(1), partial.fill(kNan);
      Buffer sum(element, all);
      // A shorter branch is used again and again.
      const std::int64_t branch_rows = rows > 0 && rows % 3 == 0 ? rows / 3 : std::max<std::int64_t>(rows, 1);
      for (std::int64_t i = 0; i < all; ++i) {
        sum.set(i, adds ? static_cast<float>(x.get(i)) + static_cast<float>(branch.get(i % (branch_rows * width)))
                        : x.get(i));
      }
      layer_norm(element, x.data(), adds ? branch.data() : nullptr, branch_rows, weight.floats(), bias.floats(), 1e-12F,
                 y.data(), mean.floats(), rstd.floats(), rows, width, nullptr);
      layer_norm_backward(element, dy.data(), x.data(), mean.floats(), rstd.floats(), weight.floats(),
                          adds ? residual.data() : nullptr, dx.data(), partial.floats(), dw.floats(), db.floats(), rows,
                          width, nullptr);
      std::vector<double> expected_dw(static_cast<std::size_t>(width), 1), expected_db = expected_dw;
      for (std::int64_t r = 0; r < rows; ++r) {
        double m = 0, variance = 0, mean_d = 0, mean_dx = 0;
        for (std::int64_t c = 0; c < width; ++c) {
          ASSERT_EQ(x.get(r * width + c), sum.get(r * width + c));
          m += x.get(r * width + c) / static_cast<double>(width);
        }
        for (std::int64_t c = 0; c < width; ++c) {
          variance += std::pow(x.get(r * width + c) - m, 2) / static_cast<double>(width);
        }
        const double s = 1 / std::sqrt(variance + 1e-12);
        for (std::int64_t c = 0; c < width; ++c) {
          const double normed = (x.get(r * width + c) - m) * s, d = dy.get(r * width + c);
          CRAM_EXPECT_CLOSE(y.get(r * width + c), normed * weight.get(c) + bias.get(c), 0.5, tolerance);
          mean_d += d * weight.get(c) / static_cast<double>(width);
          mean_dx += d * weight.get(c) * normed / static_cast<double>(width);
          expected_dw[static_cast<std::size_t>(c)] += d * normed;
          expected_db[static_cast<std::size_t>(c)] += d;
        }
        for (std::int64_t c = 0; c < width; ++c) {
          const double normed = (x.get(r * width + c) - m) * s;
          const double d = s * (dy.get(r * width + c) * weight.get(c) - mean_d - normed * mean_dx);
          CRAM_EXPECT_CLOSE(dx.get(r * width + c), d + (adds ? residual.get(r * width + c) : 0), 1, tolerance);
        }
      }
      for (std::int64_t c = 0; c < width; ++c) {
        CRAM_EXPECT_CLOSE(dw.get(c), expected_dw[static_cast<std::size_t>(c)], 5, 1e-5);
        CRAM_EXPECT_CLOSE(db.get(c), expected_db[static_cast<std::size_t>(c)], 5, 1e-5);
      }
    }
  }
}

TEST_P(Emulated, CrossEntropy) {
  for (const auto& [rows, width] : {Size{0, 40}, {2, 1}, {1, 7}, {5, 101}, {3, 4096}, {2, 8200}}) {
    for (const double scale : {0.1, 3.0, 300.0}) {
      SCOPED_TRACE(std::to_string(rows) + "x" + std::to_string(width) + ", scale " + std::to_string(scale));
      Buffer logits(element, rows * width), work(element, rows * width);
      logits.random(1, scale);
      std::vector<std::int64_t> labels(static_cast<std::size_t>(rows)), correct(static_cast<std::size_t>(rows), -7);
      std::vector<double> loss(static_cast<std::size_t>(rows)), counted = loss;
      for (std::int64_t r = 0; r < rows; ++r) labels[static_cast<std::size_t>(r)] = (r * 7 + 3) % width;
      if (rows > 0) logits.set(labels[0], 20 * scale);  // all but certain
      for (std::int64_t i = 0; i < work.size(); ++i) work.set(i, logits.get(i));
      cross_entropy(element, work.data(), labels.data(), counted.data(), correct.data(), false, rows, width, nullptr);
      for (std::int64_t i = 0; i < work.size(); ++i) ASSERT_EQ(work.get(i), logits.get(i));
      cross_entropy(element, work.data(), labels.data(), loss.data(), nullptr, true, rows, width, nullptr);
      EXPECT_EQ(loss, counted);
      for (std::int64_t r = 0; r < rows; ++r) {
        const std::int64_t label = labels[static_cast<std::size_t>(r)];
        std::int64_t best = 0;
        for (std::int64_t c = 0; c < width; ++c) {
          if (logits.get(r * width + c) > logits.get(r * width + best)) best = c;
        }
        const double top = logits.get(r * width + best), own = logits.get(r * width + label);
        double others = 0;
        for (std::int64_t c = 0; c < width; ++c) {
          if (c != label) others += std::exp(logits.get(r * width + c) - top);
        }
        const double total = others + std::exp(own - top);
        EXPECT_EQ(correct[static_cast<std::size_t>(r)], best == label ? 1 : 0);
        CRAM_EXPECT_CLOSE(loss[static_cast<std::size_t>(r)],
                          own == top ? std::log1p(others) : top - own + std::log(total), 1e-30, 2e-6);
        for (std::int64_t c = 0; c < width; ++c) {
          const double p = c == label ? -others / total : std::exp(logits.get(r * width + c) - top) / total;
          CRAM_EXPECT_CLOSE(work.get(r * width + c), p, 1e-30, element == Element::kBf16 ? 0.0045 : 1e-4);
        }
      }
    }
  }
}

TEST_P(Emulated, ScatterAddRows) {
  constexpr std::int64_t kIds = 800;
  for (const auto& [rows, width] :
       {Size{0, 16}, {1, 5}, {31, 8}, {32, 8}, {33, 8}, {64, 8}, {97, 8}, {50, 48}, {333, 200}}) {
    // All different; many twice, some -1; nearly all one; two long runs; runs as long as the pieces of the kernel.
    for (int kind = 0; kind < 5; ++kind) {
      SCOPED_TRACE(std::to_string(rows) + "x" + std::to_string(width) + ", kind " + std::to_string(kind));
      const auto id_of = [&, n = rows](std::int64_t i) -> std::int64_t {
        return kind == 0   ? i
               : kind == 1 ? i * 5 % 17 - 1
               : kind == 2 ? (i % 50 == 7 ? i : 4)
               : kind == 3 ? (i < n / 2 ? 2 : 7)
                           : i / 32;
      };
      std::vector<std::int64_t> order(static_cast<std::size_t>(rows));
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return id_of(a) < id_of(b); });
      std::vector<std::int32_t> ids;
      for (const std::int64_t i : order) ids.push_back(static_cast<std::int32_t>(id_of(i)));
      Buffer d(element, rows * width), grad(Element::kFloat, kIds * width);
      Buffer partial(Element::kFloat, scatter_partial_size(rows, width));
      d.random(1), grad.random(2), partial.fill(kNan);
      std::vector<double> expected;
      for (std::int64_t i = 0; i < grad.size(); ++i) expected.push_back(grad.get(i));
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t c = 0; c < width && id_of(i) >= 0; ++c) {
          expected[static_cast<std::size_t>(id_of(i) * width + c)] += d.get(i * width + c);
        }
      }
      scatter_add_rows(element, grad.floats(), ids.data(), order.data(), d.data(), partial.floats(), -1, rows, width,
                       nullptr);
      for (std::int64_t i = 0; i < grad.size(); ++i) {
        CRAM_EXPECT_CLOSE(grad.get(i), expected[static_cast<std::size_t>(i)], 5, 2e-6);
      }
    }
  }
}

TEST_P(Emulated, AddTo) {
  for (const std::int64_t count : {0, 1, 17, 1000, 10'003}) {
    Buffer sum(Element::kFloat, count), x(element, count);
    sum.random(1), x.random(2);
    std::vector<float> expected;
    for (std::int64_t i = 0; i < count; ++i) expected.push_back(sum.floats()[i] + static_cast<float>(x.get(i)));
    add_to(element, sum.floats(), x.data(), count, nullptr);
    for (std::int64_t i = 0; i < count; ++i) ASSERT_EQ(sum.floats()[i], expected[static_cast<std::size_t>(i)]);
  }
}

INSTANTIATE_TEST_SUITE_P(Orders, Emulated,
                         ::testing::Combine(::testing::Values(Element::kBf16, Element::kFloat), ::testing::Bool()));

// More pieces than one launch takes; the bits of the CPU's loops.
TEST(EmulatedOptimizer, AdamWAndTheGradientNorm) {
  const AdamWStep step{.lr = 1e-2, .weight_decay = 0.1, .grad_scale = 0.01, .step = 3};
  struct State {
    std::vector<float> master, grad, exp_avg, exp_avg_sq;
    std::vector<std::uint16_t> working;
  };
  std::vector<State> states;
  for (std::size_t i = 0; i < 30; ++i) {
    const std::size_t count = i == 0 ? 0 : i == 1 ? 1 : i == 2 ? 70'007 : 64 * i;
    std::mt19937 source(static_cast<unsigned>(i));
    std::normal_distribution<float> normal;
    State state{std::vector<float>(count), std::vector<float>(count), std::vector<float>(count),
                std::vector<float>(count), std::vector<std::uint16_t>(count)};
    for (std::size_t k = 0; k < count; ++k) {
      state.master[k] = normal(source);
      state.grad[k] = 100 * normal(source);
      state.exp_avg[k] = normal(source);
      state.exp_avg_sq[k] = std::abs(normal(source));
    }
    states.push_back(std::move(state));
  }
  std::vector<State> expected = states;
  std::vector<FlatPiece> pieces;
  for (std::size_t i = 0; i < states.size(); ++i) {
    State& s = states[i];
    const auto count = static_cast<std::int64_t>(s.master.size());
    std::vector<double> partial(static_cast<std::size_t>(squares_partial_size(count)), kNan);
    double found = kNan, sum = 0;
    sum_of_squares(s.grad.data(), count, partial.data(), &found, nullptr);
    for (const float g : s.grad) sum += static_cast<double>(g) * static_cast<double>(g);
    EXPECT_NEAR(found, sum, 1e-12 * sum);
    const bool rounds = i % 3 != 0;
    pieces.push_back({s.master.data(), s.grad.data(), s.exp_avg.data(), s.exp_avg_sq.data(),
                      rounds ? s.working.data() : nullptr, Element::kBf16, count, coefficients_of<float>(step)});
    State& e = expected[i];
    adamw_chunk(step, e.master.data(), e.grad.data(), e.exp_avg.data(), e.exp_avg_sq.data(),
                rounds ? e.working.data() : nullptr, count);
  }
  adamw(pieces, nullptr);
  for (std::size_t i = 0; i < states.size(); ++i) {
    EXPECT_EQ(states[i].master, expected[i].master) << i;
    EXPECT_EQ(states[i].grad, expected[i].grad) << i;
    EXPECT_EQ(states[i].exp_avg, expected[i].exp_avg) << i;
    EXPECT_EQ(states[i].exp_avg_sq, expected[i].exp_avg_sq) << i;
    EXPECT_EQ(states[i].working, expected[i].working) << i;
  }
}

}  // namespace
}  // namespace cram::kernels::cuda::launch
