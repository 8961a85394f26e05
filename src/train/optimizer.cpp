#include "train/optimizer.h"

#include <torch/types.h>

#include <algorithm>
#include <cmath>

#include "base/profile.h"
#include "model/kernels/kernels.h"

namespace cram {
namespace {

// Adds what this rank updates of a buffer.
void add_owned_pieces(const FlatBuffers& b, const kernels::AdamWStep& step, std::vector<kernels::AdamWPiece>& pieces) {
  if (b.owns_all()) {
    const bool separate = !b.working.is_same(b.master);
    pieces.push_back({b.master, b.grad, b.exp_avg, b.exp_avg_sq, separate ? b.working : at::Tensor(), step});
    return;
  }
  for (const Bucket& bucket : b.buckets) {
    const auto own = [&](const at::Tensor& flat) { return flat.narrow(0, bucket.at, bucket.owned()); };
    pieces.push_back({own(b.master), own(b.owned_grad), own(b.exp_avg), own(b.exp_avg_sq),
                      b.working.narrow(0, bucket.own_begin, bucket.owned()), step});
  }
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
  at::Tensor own;  // stays on the device until all are added: one synchronisation
  for (const FlatBuffers& b : store_.buffers()) {
    // Of several ranks that hold the same values one adds them.
    const bool adds = b.counts && (b.sharded || place.tp_rank == 0) && (!b.owns_all() || place.dp_rank == 0);
    if (!adds) continue;
    const at::Tensor sum = kernels::sum_of_squares(b.owned_grad);
    own = own.defined() ? own.add_(sum) : sum;
  }
  const at::Tensor total = own.defined() ? own.cpu().view({1}) : at::zeros({1}, at::kDouble);
  mesh_.world().all_reduce_(total);
  return std::sqrt(total.item<double>());
}

void Optimizer::update(std::int64_t step, double lr, double grad_scale) {
  const Timed timed(Section::kOptimizer);
  std::vector<kernels::AdamWPiece> pieces;
  for (const FlatBuffers& b : store_.buffers()) {
    add_owned_pieces(b,
                     {.lr = lr,
                      .beta1 = settings_.beta1,
                      .beta2 = settings_.beta2,
                      .eps = settings_.eps,
                      .weight_decay = b.decay ? settings_.weight_decay : 0,
                      .grad_scale = grad_scale,
                      .step = step},
                     pieces);
  }
  kernels::adamw_(pieces);
  std::vector<Work> gathering;
  for (const FlatBuffers& b : store_.buffers()) {
    if (b.owns_all()) continue;
    gather_working(b, mesh_.data(), gathering);
    b.grad.zero_();  // the update cleared the owned sums only
  }
  for (Work& work : gathering) work.wait();
  store_.weights_written();
}

}  // namespace cram
