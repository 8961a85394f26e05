#include "model/kernels/adamw.h"

#include <bit>
#include <cmath>

#if defined(__x86_64__)
#include <xmmintrin.h>
// Compiled once per instruction set and chosen at start-up; contraction is off (see CMakeLists.txt), so every version
// gives the same bits.
#define CRAM_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define CRAM_CLONES
#endif

namespace cram::kernels {
namespace {

#if defined(__x86_64__)
// Flush-to-zero and denormals-are-zero for the calling thread during one chunk.
class FlushDenormals {
 public:
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040U); }
  ~FlushDenormals() { _mm_setcsr(saved_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  unsigned saved_;
};
#else
struct FlushDenormals {};
#endif

template <class Real>
[[gnu::always_inline]] inline void update(const AdamWCoefficients<Real>& c, Real* __restrict master,
                                          Real* __restrict grad, Real* __restrict exp_avg, Real* __restrict exp_avg_sq,
                                          std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const Real g = grad[i] * c.scale;
    const Real m = c.beta1 * exp_avg[i] + c.one_minus_beta1 * g;
    const Real v = c.beta2 * exp_avg_sq[i] + c.one_minus_beta2 * g * g;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    master[i] = c.keep * master[i] - c.step_size * m / (std::sqrt(v) / c.root_bias + c.eps);
    grad[i] = 0;
  }
}

CRAM_CLONES void update_f32(const AdamWCoefficients<float>& c, float* master, float* grad, float* exp_avg,
                            float* exp_avg_sq, std::int64_t count) {
  update(c, master, grad, exp_avg, exp_avg_sq, count);
}

CRAM_CLONES void update_f64(const AdamWCoefficients<double>& c, double* master, double* grad, double* exp_avg,
                            double* exp_avg_sq, std::int64_t count) {
  update(c, master, grad, exp_avg, exp_avg_sq, count);
}

CRAM_CLONES void round_to_bf16(const float* __restrict from, std::uint16_t* __restrict to, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const auto bits = std::bit_cast<std::uint32_t>(from[i]);
    // Round to nearest even; NaN stays NaN because its mantissa is only ever cut when no carry can reach the exponent.
    const std::uint32_t rounded = (bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16;
    const bool is_nan = (bits & 0x7fffffffU) > 0x7f800000U;
    to[i] = static_cast<std::uint16_t>(is_nan ? (bits >> 16) | 0x40U : rounded);
  }
}

// Sixteen running sums, then a fixed tree: the same order whatever the vector width.
template <class Real>
[[gnu::always_inline]] inline double squares(const Real* __restrict values, std::int64_t count) {
  double lanes[16] = {};
  std::int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    for (int lane = 0; lane < 16; ++lane) {
      const auto value = static_cast<double>(values[i + lane]);
      lanes[lane] += value * value;
    }
  }
  for (; i < count; ++i) lanes[i % 16] += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  for (int width = 8; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

CRAM_CLONES double squares_f32(const float* values, std::int64_t count) { return squares(values, count); }
CRAM_CLONES double squares_f64(const double* values, std::int64_t count) { return squares(values, count); }

}  // namespace

void adamw_chunk(const AdamWStep& step, float* master, float* grad, float* exp_avg, float* exp_avg_sq,
                 std::uint16_t* working, std::int64_t count) {
  [[maybe_unused]] const FlushDenormals guard;
  update_f32(coefficients_of<float>(step), master, grad, exp_avg, exp_avg_sq, count);
  if (working != nullptr) round_to_bf16(master, working, count);
}

void adamw_chunk(const AdamWStep& step, double* master, double* grad, double* exp_avg, double* exp_avg_sq,
                 std::uint16_t* /*working: fp64 runs have one copy*/, std::int64_t count) {
  [[maybe_unused]] const FlushDenormals guard;
  update_f64(coefficients_of<double>(step), master, grad, exp_avg, exp_avg_sq, count);
}

double sum_of_squares_of(const float* values, std::int64_t count) { return squares_f32(values, count); }
double sum_of_squares_of(const double* values, std::int64_t count) { return squares_f64(values, count); }

}  // namespace cram::kernels
