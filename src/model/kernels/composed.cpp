#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "model/kernels/backend.h"

namespace cram::kernels {
namespace composed {
namespace {

// CUDA's layer norm wants one dtype; the CPU's takes a bf16 input with fp32 weights.
at::Tensor weight_for(const at::Tensor& x, const at::Tensor& weight) {
  return x.is_cuda() ? weight.to(x.scalar_type()) : weight;
}

// Rows of logits that are widened to fp32 at a time: bounds the temporary at V = 32768 to 32 MB.
constexpr std::int64_t kLossBlockElements = 8 << 20;

// Rows of a norm's gradient that are widened to fp32 at a time.
constexpr std::int64_t kNormBlockRows = 1024;

}  // namespace

NormOutput layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps) {
  auto [y, mean, rstd] = at::native_layer_norm(x, {x.size(-1)}, weight_for(x, weight), weight_for(x, bias), eps);
  return {y, mean, rstd};
}

at::Tensor layer_norm_backward(const at::Tensor& dy, const at::Tensor& x, const NormOutput& saved,
                               const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& weight_grad,
                               const at::Tensor& bias_grad, const at::Tensor& residual) {
  // ATen's CPU code adds the gradients of weight and bias up in the input's format: in bf16 the sum over hundreds of
  // rows stops growing (errors of 20% were measured at 1,024 rows).
  const bool wide = x.scalar_type() == weight_grad.scalar_type();
  auto [dx, dweight, dbias] = at::native_layer_norm_backward(
      dy, x, {x.size(-1)}, saved.mean, saved.rstd, weight_for(x, weight), weight_for(x, bias), {true, wide, wide});
  if (wide) {
    weight_grad.add_(dweight);
    bias_grad.add_(dbias);
  } else {
    const auto type = weight_grad.scalar_type();
    for (std::int64_t first = 0; first < x.size(0); first += kNormBlockRows) {
      const std::int64_t rows = std::min(kNormBlockRows, x.size(0) - first);
      const auto block = [&](const at::Tensor& whole) { return whole.narrow(0, first, rows).to(type); };
      const at::Tensor dy_rows = block(dy);
      bias_grad.add_(dy_rows.sum(0));
      const at::Tensor normed =
          block(x).sub_(block(saved.mean).view({rows, 1})).mul_(block(saved.rstd).view({rows, 1}));
      weight_grad.add_(normed.mul_(dy_rows).sum(0));
    }
  }
  return residual.defined() ? dx.add_(residual) : dx;
}

NormOutput add_layer_norm_(const at::Tensor& x, const at::Tensor& branch, const at::Tensor& weight,
                           const at::Tensor& bias, double eps) {
  if (branch.size(0) == x.size(0)) {
    x.add_(branch);
  } else {
    x.view({-1, branch.size(0), x.size(1)}).add_(branch);
  }
  return layer_norm(x, weight, bias, eps);
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

namespace {

// [N,3*heads*d] = [B,S,heads,3,d] -> [3,B*heads,S,d]: the rows of the weight are grouped per head.
at::Tensor split_heads(const at::Tensor& qkv, std::int64_t batch, std::int64_t heads) {
  const std::int64_t seq = qkv.size(0) / batch, head_dim = qkv.size(1) / (3 * heads);
  return qkv.view({batch, seq, heads, 3, head_dim})
      .permute({3, 0, 2, 1, 4})
      .contiguous()
      .view({3, batch * heads, seq, head_dim});
}

at::Tensor attention_probabilities(const at::Tensor& q, const at::Tensor& k, const AttentionSettings& settings) {
  const at::Tensor scores = at::bmm(q, k.transpose(1, 2)).mul_(1 / std::sqrt(static_cast<double>(q.size(2))));
  if (settings.lengths.defined()) {
    const std::int64_t seq = q.size(1);
    const at::Tensor padding =  // [B,S]
        at::arange(seq, settings.lengths.options()).unsqueeze(0).ge(settings.lengths.unsqueeze(1));
    scores.view({settings.batch, settings.heads, seq, seq})
        .masked_fill_(padding.view({settings.batch, 1, 1, seq}), -std::numeric_limits<double>::infinity());
  }
  return at::softmax(scores, -1);  // [B*heads,S,S]
}

}  // namespace

at::Tensor attention(const at::Tensor& qkv, const AttentionSettings& settings, AttentionSaved* saved) {
  const std::int64_t batch = settings.batch, heads = settings.heads;
  const at::Tensor split = split_heads(qkv, batch, heads);
  const std::int64_t seq = split.size(2), head_dim = split.size(3);
  const at::Tensor p = attention_probabilities(split[0], split[1], settings);
  if (saved != nullptr) {
    saved->split = split;
    if (settings.keep_probabilities) saved->probabilities = p;
  }
  return at::bmm(p, split[2])
      .view({batch, heads, seq, head_dim})
      .transpose(1, 2)
      .reshape({batch * seq, heads * head_dim});
}

at::Tensor attention_backward(const at::Tensor& d_context, const AttentionSettings& settings,
                              const AttentionSaved& saved) {
  const std::int64_t batch = settings.batch, heads = settings.heads;
  const at::Tensor q = saved.split[0], k = saved.split[1], v = saved.split[2];  // [B*heads,S,d]
  const std::int64_t seq = q.size(1), head_dim = q.size(2);
  const at::Tensor p = saved.probabilities.defined() ? saved.probabilities : attention_probabilities(q, k, settings);
  const at::Tensor d_heads =
      d_context.view({batch, seq, heads, head_dim}).transpose(1, 2).reshape({batch * heads, seq, head_dim});
  const at::Tensor d_p = at::bmm(d_heads, v.transpose(1, 2));
  const at::Tensor d_scores =
      at::_softmax_backward_data(d_p, p, -1, p.scalar_type()).mul_(1 / std::sqrt(static_cast<double>(head_dim)));
  const at::Tensor d_split = at::empty_like(saved.split);
  at::Tensor d_q = d_split[0], d_k = d_split[1], d_v = d_split[2];
  at::bmm_out(d_q, d_scores, k);
  at::bmm_out(d_k, d_scores.transpose(1, 2), q);
  at::bmm_out(d_v, p.transpose(1, 2), d_heads);
  return d_split.view({3, batch, heads, seq, head_dim})
      .permute({1, 3, 2, 0, 4})
      .reshape({batch * seq, 3 * heads * head_dim});
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

at::Tensor product_transposed(const at::Tensor& x, const at::Tensor& weight, WeightPanels& /*panels*/) {
  return at::mm(x, weight.t());
}

at::Tensor product(const at::Tensor& dy, const at::Tensor& weight, WeightPanels& /*panels*/) {
  return at::mm(dy, weight);
}

void add_transposed_product_(const at::Tensor& sum, const at::Tensor& dy, const at::Tensor& x) {
  if (sum.scalar_type() == x.scalar_type()) {
    at::Tensor target = sum;
    at::addmm_out(target, sum, dy.t(), x);
  } else {
    kernels::add_to_(sum, at::mm(dy.t(), x));  // a rounded product, a wide sum
  }
}

void add_to_(const at::Tensor& sum, const at::Tensor& x) { sum.add_(x); }

void scatter_add_rows(const at::Tensor& grad, const at::Tensor& ids, const at::Tensor& d_rows, std::int64_t skip_id) {
  // Rows of the skipped id are zeroed rather than removed: no data-dependent shape, so no host synchronisation.
  const at::Tensor kept = d_rows.to(grad.scalar_type()) * ids.ne(skip_id).unsqueeze(1);
  grad.index_add_(0, ids.clamp_min(0), kept);
}

void adamw_(const std::vector<AdamWPiece>& pieces) {
  for (const AdamWPiece& piece : pieces) {
    const AdamWStep& step = piece.step;
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
}

at::Tensor sum_of_squares(const at::Tensor& flat) { return flat.to(at::kDouble).square().sum(); }

namespace {
bool takes_all(const at::Tensor& /*x*/) { return true; }
bool takes_kind(at::DeviceType /*device*/, at::ScalarType /*type*/) { return true; }
bool fuses_attention(at::ScalarType /*type*/, std::int64_t /*seq*/, std::int64_t /*head_dim*/) { return false; }
}  // namespace

}  // namespace composed

constinit const Backend kComposedBackend{.name = "composed",
                                         .takes = composed::takes_all,
                                         .takes_kind = composed::takes_kind,
                                         .fuses_attention = composed::fuses_attention,
                                         .takes_master = composed::takes_all};

}  // namespace cram::kernels
