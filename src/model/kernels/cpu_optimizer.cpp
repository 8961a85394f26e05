// The optimizer's loops of the CPU backend: chunks of fixed size, shared out to threads.
#include <ATen/Parallel.h>
#include <torch/types.h>

#include <algorithm>

#include "model/kernels/cpu.h"

namespace cram::kernels::cpu {
namespace {

std::int64_t chunks_of(std::int64_t count) { return (count + kOptimizerChunk - 1) / kOptimizerChunk; }

template <class Real>
double squares(const at::Tensor& flat) {
  const auto* values = flat.const_data_ptr<Real>();
  std::vector<double> partial(static_cast<std::size_t>(chunks_of(flat.numel())));
  at::parallel_for(0, chunks_of(flat.numel()), 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t chunk = first; chunk < last; ++chunk) {
      const std::int64_t begin = chunk * kOptimizerChunk;
      partial[static_cast<std::size_t>(chunk)] =
          kernels::sum_of_squares_of(values + begin, std::min(kOptimizerChunk, flat.numel() - begin));
    }
  });
  double sum = 0;
  for (const double part : partial) sum += part;
  return sum;
}

template <class Real>
void update(const AdamWPiece& piece) {
  auto* master = piece.master.data_ptr<Real>();
  auto* grad = piece.grad.data_ptr<Real>();
  auto* exp_avg = piece.exp_avg.data_ptr<Real>();
  auto* exp_avg_sq = piece.exp_avg_sq.data_ptr<Real>();
  const std::int64_t numel = piece.master.numel();
  const bool rounds = piece.working.defined() && piece.working.scalar_type() == at::kBFloat16;
  auto* working = rounds ? reinterpret_cast<std::uint16_t*>(piece.working.data_ptr<at::BFloat16>()) : nullptr;
  at::parallel_for(0, chunks_of(numel), 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t chunk = first; chunk < last; ++chunk) {
      const std::int64_t begin = chunk * kOptimizerChunk;
      adamw_chunk(piece.step, master + begin, grad + begin, exp_avg + begin, exp_avg_sq + begin,
                  working == nullptr ? nullptr : working + begin, std::min(kOptimizerChunk, numel - begin));
    }
  });
  if (piece.working.defined() && !rounds) at::Tensor(piece.working).copy_(piece.master);
}

}  // namespace

void adamw_(const std::vector<AdamWPiece>& pieces) {
  for (const AdamWPiece& piece : pieces) {
    if (piece.master.scalar_type() == at::kDouble) {
      update<double>(piece);
    } else {
      update<float>(piece);
    }
  }
}

at::Tensor sum_of_squares(const at::Tensor& flat) {
  return at::scalar_tensor(flat.scalar_type() == at::kDouble ? squares<double>(flat) : squares<float>(flat),
                           at::kDouble);
}

}  // namespace cram::kernels::cpu
