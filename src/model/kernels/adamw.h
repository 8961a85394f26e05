// AdamW (Loshchilov & Hutter 2019) on plain arrays: one pass that scales the gradient, updates moments and master,
// writes the working copy and clears the gradient. No tensor library here, so it compiles with its own flags.
#pragma once

#include <cmath>
#include <cstdint>

namespace cram::kernels {

struct AdamWStep {
  double lr = 0;
  double beta1 = 0.9;
  double beta2 = 0.98;
  double eps = 1e-12;
  double weight_decay = 0;  ///< 0 for classes that do not decay
  double grad_scale = 1;    ///< multiplies the accumulated gradient: clip factor / masked tokens
  std::int64_t step = 1;    ///< number of this update, from 1: bias correction
};

/// The step's factors as the loops use them, rounded once.
template <class Real>
struct AdamWCoefficients {
  Real scale, beta1, one_minus_beta1, beta2, one_minus_beta2, keep, step_size, root_bias, eps;
};

template <class Real>
[[nodiscard]] AdamWCoefficients<Real> coefficients_of(const AdamWStep& s) {
  return {.scale = static_cast<Real>(s.grad_scale),
          .beta1 = static_cast<Real>(s.beta1),
          .one_minus_beta1 = static_cast<Real>(1 - s.beta1),
          .beta2 = static_cast<Real>(s.beta2),
          .one_minus_beta2 = static_cast<Real>(1 - s.beta2),
          .keep = static_cast<Real>(1 - s.lr * s.weight_decay),
          .step_size = static_cast<Real>(s.lr / (1 - std::pow(s.beta1, static_cast<double>(s.step)))),
          .root_bias = static_cast<Real>(std::sqrt(1 - std::pow(s.beta2, static_cast<double>(s.step)))),
          .eps = static_cast<Real>(s.eps)};
}

/// Elements of one independent piece of work; also the unit of the norm's fixed summation order.
inline constexpr std::int64_t kOptimizerChunk = 1 << 16;

/// Updates `count` elements. `working` receives the new master rounded to bf16 (nearest even), or is null.
/// Denormal results are flushed to zero: they carry nothing and slow the pass tenfold.
void adamw_chunk(const AdamWStep& step, float* master, float* grad, float* exp_avg, float* exp_avg_sq,
                 std::uint16_t* working, std::int64_t count);
void adamw_chunk(const AdamWStep& step, double* master, double* grad, double* exp_avg, double* exp_avg_sq,
                 std::uint16_t* working, std::int64_t count);

/// Sum of squares in fp64 in an order that depends on `count` alone.
[[nodiscard]] double sum_of_squares_of(const float* values, std::int64_t count);
[[nodiscard]] double sum_of_squares_of(const double* values, std::int64_t count);

}  // namespace cram::kernels
