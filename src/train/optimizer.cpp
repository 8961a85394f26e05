#include "train/optimizer.h"

#include <ATen/Parallel.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>

namespace cram {
namespace {

std::int64_t chunks_of(std::int64_t count) { return (count + kOptimizerChunk - 1) / kOptimizerChunk; }

template <class Real>
double cpu_sum_of_squares(const at::Tensor& flat) {
  const auto* values = flat.const_data_ptr<Real>();
  std::vector<double> partial(static_cast<std::size_t>(chunks_of(flat.numel())));
  at::parallel_for(0, chunks_of(flat.numel()), 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t chunk = first; chunk < last; ++chunk) {
      const std::int64_t begin = chunk * kOptimizerChunk;
      partial[static_cast<std::size_t>(chunk)] =
          sum_of_squares(values + begin, std::min(kOptimizerChunk, flat.numel() - begin));
    }
  });
  double sum = 0;
  for (const double part : partial) sum += part;
  return sum;
}

template <class Real>
void cpu_update(const AdamWStep& step, FlatBuffers& b) {
  auto* master = b.master.data_ptr<Real>();
  auto* grad = b.grad.data_ptr<Real>();
  auto* exp_avg = b.exp_avg.data_ptr<Real>();
  auto* exp_avg_sq = b.exp_avg_sq.data_ptr<Real>();
  const bool separate = !b.working.is_same(b.master);
  auto* working = separate ? reinterpret_cast<std::uint16_t*>(b.working.data_ptr<at::BFloat16>()) : nullptr;
  at::parallel_for(0, chunks_of(b.numel), 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t chunk = first; chunk < last; ++chunk) {
      const std::int64_t begin = chunk * kOptimizerChunk;
      adamw_chunk(step, master + begin, grad + begin, exp_avg + begin, exp_avg_sq + begin,
                  working == nullptr ? nullptr : working + begin, std::min(kOptimizerChunk, b.numel - begin));
    }
  });
}

// The same update from ATen operators, for devices without a kernel of their own.
void composed_update(const AdamWStep& step, FlatBuffers& b) {
  const double bias1 = 1 - std::pow(step.beta1, static_cast<double>(step.step));
  const double bias2 = 1 - std::pow(step.beta2, static_cast<double>(step.step));
  b.grad.mul_(step.grad_scale);
  b.exp_avg.mul_(step.beta1).add_(b.grad, 1 - step.beta1);
  b.exp_avg_sq.mul_(step.beta2).addcmul_(b.grad, b.grad, 1 - step.beta2);
  const at::Tensor denominator = b.exp_avg_sq.sqrt().div_(std::sqrt(bias2)).add_(step.eps);
  b.master.mul_(1 - step.lr * step.weight_decay).addcdiv_(b.exp_avg, denominator, -step.lr / bias1);
  if (!b.working.is_same(b.master)) b.working.copy_(b.master);
  b.grad.zero_();
}

}  // namespace

double clip_factor(double norm, double clip) { return clip <= 0 ? 1.0 : std::min(1.0, clip / (norm + 1e-6)); }

double Optimizer::grad_norm() const {
  double replicated = 0;
  const at::Tensor sharded = at::zeros({1}, at::kDouble);
  for (const FlatBuffers& b : store_.buffers()) {
    double sum = 0;
    if (!b.grad.is_cpu()) {
      sum = b.grad.to(at::kDouble).square_().sum().item<double>();
    } else if (b.grad.scalar_type() == at::kDouble) {
      sum = cpu_sum_of_squares<double>(b.grad);
    } else {
      sum = cpu_sum_of_squares<float>(b.grad);
    }
    if (b.sharded) {
      sharded.add_(sum);
    } else {
      replicated += sum;
    }
  }
  tensor_.all_reduce_(sharded);
  return std::sqrt(sharded.item<double>() + replicated);
}

void Optimizer::update(std::int64_t step, double lr, double grad_scale) {
  for (FlatBuffers& b : store_.buffers()) {
    const AdamWStep one{.lr = lr,
                        .beta1 = settings_.beta1,
                        .beta2 = settings_.beta2,
                        .eps = settings_.eps,
                        .weight_decay = b.decay ? settings_.weight_decay : 0,
                        .grad_scale = grad_scale,
                        .step = step};
    if (!b.master.is_cpu()) {
      composed_update(one, b);
    } else if (b.master.scalar_type() == at::kDouble) {
      cpu_update<double>(one, b);
    } else {
      cpu_update<float>(one, b);
    }
  }
}

}  // namespace cram
