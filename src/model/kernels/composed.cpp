#include <torch/types.h>

#include <algorithm>

#include "model/kernels/kernels.h"

namespace cram::kernels {
namespace {

// CUDA's layer norm wants one dtype; the CPU's takes a bf16 input with fp32 weights.
at::Tensor weight_for(const at::Tensor& x, const at::Tensor& weight) {
  return x.is_cuda() ? weight.to(x.scalar_type()) : weight;
}

// Rows of logits that are widened to fp32 at a time: bounds the temporary at V = 32768 to 32 MB.
constexpr std::int64_t kLossBlockElements = 8 << 20;

}  // namespace

NormOutput layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps) {
  auto [y, mean, rstd] = at::native_layer_norm(x, {x.size(-1)}, weight_for(x, weight), weight_for(x, bias), eps);
  return {y, mean, rstd};
}

at::Tensor layer_norm_backward(const at::Tensor& dy, const at::Tensor& x, const NormOutput& saved,
                               const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& weight_grad,
                               const at::Tensor& bias_grad) {
  auto [dx, dweight, dbias] = at::native_layer_norm_backward(
      dy, x, {x.size(-1)}, saved.mean, saved.rstd, weight_for(x, weight), weight_for(x, bias), {true, true, true});
  weight_grad.add_(dweight);
  bias_grad.add_(dbias);
  return dx;
}

at::Tensor geglu(const at::Tensor& u) {
  const std::int64_t half = u.size(-1) / 2;
  return at::gelu(u.slice(-1, half)).mul_(u.slice(-1, 0, half));
}

at::Tensor geglu_backward(const at::Tensor& d_out, const at::Tensor& u) {
  const std::int64_t half = u.size(-1) / 2;
  const at::Tensor value = u.slice(-1, 0, half);
  const at::Tensor gate = u.slice(-1, half);
  at::Tensor du = at::empty_like(u);
  at::Tensor d_value = du.slice(-1, 0, half);
  at::Tensor d_gate = du.slice(-1, half);
  at::mul_out(d_value, d_out, at::gelu(gate));
  d_gate.copy_(at::gelu_backward(d_out * value, gate));
  return du;
}

void scatter_add_rows(const at::Tensor& grad, const at::Tensor& ids, const at::Tensor& d_rows, std::int64_t skip_id) {
  // Rows of the skipped id are zeroed rather than removed: no data-dependent shape, so no host synchronisation.
  const at::Tensor kept = d_rows.to(grad.scalar_type()) * ids.ne(skip_id).unsqueeze(1);
  grad.index_add_(0, ids.clamp_min(0), kept);
}

CrossEntropy cross_entropy_(const at::Tensor& logits, const at::Tensor& labels, bool write_gradient) {
  const std::int64_t rows = logits.size(0);
  const std::int64_t block = std::max<std::int64_t>(1, kLossBlockElements / std::max<std::int64_t>(1, logits.size(1)));
  const at::ScalarType wide = logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  CrossEntropy out{at::zeros({}, logits.options().dtype(at::kDouble)),
                   at::zeros({}, labels.options().dtype(at::kLong))};
  for (std::int64_t begin = 0; begin < rows; begin += block) {
    const std::int64_t count = std::min(block, rows - begin);
    const at::Tensor rounded = logits.narrow(0, begin, count);
    const at::Tensor f = rounded.to(wide);                                  // [count,V]
    const at::Tensor target = labels.narrow(0, begin, count).unsqueeze(1);  // [count,1]
    const at::Tensor log_sum = at::logsumexp(f, {1}, /*keepdim=*/true);     // [count,1]
    out.loss_sum.add_((log_sum - f.gather(1, target)).sum(at::kDouble));
    if (write_gradient) {
      at::Tensor p = at::sub(f, log_sum).exp_();
      p.scatter_add_(1, target, at::full_like(log_sum, -1));
      rounded.copy_(p);
    } else {
      out.correct.add_(f.argmax(1, /*keepdim=*/true).eq(target).sum());
    }
  }
  return out;
}

}  // namespace cram::kernels
