#include "train/optimizer.h"

#include <ATen/Parallel.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>

#include "base/profile.h"

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

// A part of the flat buffers that is updated in one go. `working` is undefined where the master itself is used.
struct Piece {
  at::Tensor master, grad, exp_avg, exp_avg_sq, working;
};

std::vector<Piece> owned_pieces(const FlatBuffers& b) {
  const bool separate = !b.working.is_same(b.master);
  if (b.owns_all()) {
    return {{b.master, b.grad, b.exp_avg, b.exp_avg_sq, separate ? b.working : at::Tensor()}};
  }
  std::vector<Piece> pieces;
  for (const Bucket& bucket : b.buckets) {
    const auto own = [&](const at::Tensor& flat) { return flat.narrow(0, bucket.at, bucket.owned()); };
    pieces.push_back({own(b.master), own(b.owned_grad), own(b.exp_avg), own(b.exp_avg_sq),
                      b.working.narrow(0, bucket.own_begin, bucket.owned())});
  }
  return pieces;
}

template <class Real>
void cpu_update(const AdamWStep& step, const Piece& piece) {
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
      adamw_chunk(step, master + begin, grad + begin, exp_avg + begin, exp_avg_sq + begin,
                  working == nullptr ? nullptr : working + begin, std::min(kOptimizerChunk, numel - begin));
    }
  });
  if (piece.working.defined() && !rounds) piece.working.copy_(piece.master);
}

// The same update from ATen operators, for devices without a kernel of their own.
void composed_update(const AdamWStep& step, const Piece& piece) {
  const double bias1 = 1 - std::pow(step.beta1, static_cast<double>(step.step));
  const double bias2 = 1 - std::pow(step.beta2, static_cast<double>(step.step));
  piece.grad.mul_(step.grad_scale);
  piece.exp_avg.mul_(step.beta1).add_(piece.grad, 1 - step.beta1);
  piece.exp_avg_sq.mul_(step.beta2).addcmul_(piece.grad, piece.grad, 1 - step.beta2);
  const at::Tensor denominator = piece.exp_avg_sq.sqrt().div_(std::sqrt(bias2)).add_(step.eps);
  piece.master.mul_(1 - step.lr * step.weight_decay).addcdiv_(piece.exp_avg, denominator, -step.lr / bias1);
  if (piece.working.defined()) piece.working.copy_(piece.master);
  piece.grad.zero_();
}

double sum_of_squares_of(const at::Tensor& flat) {
  if (!flat.is_cpu()) return flat.to(at::kDouble).square_().sum().item<double>();
  return flat.scalar_type() == at::kDouble ? cpu_sum_of_squares<double>(flat) : cpu_sum_of_squares<float>(flat);
}

// Every rank's owned slices of the working weights, in place.
void gather_working(const FlatBuffers& b, Communicator& data, std::vector<Work>& pending) {
  for (const Bucket& bucket : b.buckets) {
    pending.push_back(data.all_gather_async(b.working.narrow(0, bucket.begin, bucket.numel()),
                                            b.working.narrow(0, bucket.own_begin, bucket.owned())));
  }
}

}  // namespace

double clip_factor(double norm, double clip) { return clip <= 0 ? 1.0 : std::min(1.0, clip / (norm + 1e-6)); }

double Optimizer::grad_norm() const {
  const Timed timed(Section::kOptimizer);
  const MeshCoordinates& place = mesh_.place();
  const at::Tensor total = at::zeros({1}, at::kDouble);
  for (const FlatBuffers& b : store_.buffers()) {
    // Of several ranks that hold the same values one adds them.
    const bool adds = b.counts && (b.sharded || place.tp_rank == 0) && (!b.owns_all() || place.dp_rank == 0);
    if (adds) total.add_(sum_of_squares_of(b.owned_grad));
  }
  mesh_.world().all_reduce_(total);
  return std::sqrt(total.item<double>());
}

void Optimizer::update(std::int64_t step, double lr, double grad_scale) {
  const Timed timed(Section::kOptimizer);
  std::vector<Work> gathering;
  for (FlatBuffers& b : store_.buffers()) {
    const AdamWStep one{.lr = lr,
                        .beta1 = settings_.beta1,
                        .beta2 = settings_.beta2,
                        .eps = settings_.eps,
                        .weight_decay = b.decay ? settings_.weight_decay : 0,
                        .grad_scale = grad_scale,
                        .step = step};
    for (const Piece& piece : owned_pieces(b)) {
      if (!piece.master.is_cpu()) {
        composed_update(one, piece);
      } else if (piece.master.scalar_type() == at::kDouble) {
        cpu_update<double>(one, piece);
      } else {
        cpu_update<float>(one, piece);
      }
    }
    if (b.owns_all()) continue;
    gather_working(b, mesh_.data(), gathering);
    b.grad.zero_();  // the update cleared the owned sums only
  }
  for (Work& work : gathering) work.wait();
  store_.weights_written();
}

}  // namespace cram
