// The CUDA backend: kernels of launch.h on the current stream, flash attention of ATen. Nothing waits for the device,
// so all of it can be captured in a graph.
#include "model/kernels/cuda/backend.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/types.h>

#include "base/check.h"
#include "model/kernels/backend.h"
#include "model/kernels/cuda/launch.h"

namespace cram::kernels {
namespace cuda {

namespace {
bool takes_kind(at::DeviceType device, at::ScalarType type) {
  return device == at::kCUDA && (type == at::kBFloat16 || type == at::kFloat);
}
}  // namespace

bool takes(const at::Tensor& x) { return takes_kind(x.device().type(), x.scalar_type()) && x.is_contiguous(); }

namespace {

bool is_float(const at::Tensor& x) { return x.is_cuda() && x.scalar_type() == at::kFloat && x.is_contiguous(); }
bool is_long(const at::Tensor& x) { return x.is_cuda() && x.scalar_type() == at::kLong && x.is_contiguous(); }
/// Another operand of an operation that was chosen by x.
bool goes_with(const at::Tensor& other, const at::Tensor& x) {
  return other.scalar_type() == x.scalar_type() && takes(other);
}
bool takes_master(const at::Tensor& flat) { return is_float(flat); }

// Column and row numbers inside of a kernel are 32 bits, numbers of blocks 31.
constexpr std::int64_t kMost = (std::int64_t{1} << 31) - 4096;
bool fits(const at::Tensor& x) { return x.size(0) < kMost && x.size(1) < kMost; }

launch::Element element_of(const at::Tensor& x) {
  return x.scalar_type() == at::kBFloat16 ? launch::Element::kBf16 : launch::Element::kFloat;
}

// The tensors' GPU and its current stream, for one operation.
class OnStream {
 public:
  explicit OnStream(const at::Tensor& x) : guard_(x.device()), stream_(at::cuda::getCurrentCUDAStream()) {}
  [[nodiscard]] launch::Stream stream() const { return stream_.stream(); }
  void check() const { C10_CUDA_KERNEL_LAUNCH_CHECK(); }

 private:
  c10::cuda::CUDAGuard guard_;
  c10::cuda::CUDAStream stream_;
};

NormOutput norm_rows(const at::Tensor& x, const at::Tensor& branch, const at::Tensor& weight, const at::Tensor& bias,
                     double eps) {
  const std::int64_t rows = x.size(0), width = x.size(1);
  const at::TensorOptions wide = x.options().dtype(at::kFloat);
  NormOutput out{at::empty_like(x), at::empty({rows, 1}, wide), at::empty({rows, 1}, wide)};
  const OnStream on(x);
  launch::layer_norm(element_of(x), x.data_ptr(), branch.defined() ? branch.const_data_ptr() : nullptr,
                     branch.defined() ? branch.size(0) : 1, weight.const_data_ptr<float>(),
                     bias.const_data_ptr<float>(), static_cast<float>(eps), out.y.data_ptr(),
                     out.mean.data_ptr<float>(), out.rstd.data_ptr<float>(), rows, width, on.stream());
  on.check();
  return out;
}

NormOutput layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps) {
  if (!is_float(weight) || !is_float(bias) || !fits(x)) return composed::layer_norm(x, weight, bias, eps);
  return norm_rows(x, at::Tensor(), weight, bias, eps);
}

NormOutput add_layer_norm_(const at::Tensor& x, const at::Tensor& branch, const at::Tensor& weight,
                           const at::Tensor& bias, double eps) {
  if (!goes_with(branch, x) || !is_float(weight) || !is_float(bias) || !fits(x)) {
    return composed::add_layer_norm_(x, branch, weight, bias, eps);
  }
  return norm_rows(x, branch, weight, bias, eps);
}

at::Tensor layer_norm_backward(const at::Tensor& dy, const at::Tensor& x, const NormOutput& saved,
                               const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& weight_grad,
                               const at::Tensor& bias_grad, const at::Tensor& residual) {
  if (!goes_with(dy, x) || (residual.defined() && !goes_with(residual, x)) || !is_float(weight) ||
      !is_float(weight_grad) || !is_float(bias_grad) || !is_float(saved.mean) || !is_float(saved.rstd) || !fits(x)) {
    return composed::layer_norm_backward(dy, x, saved, weight, bias, weight_grad, bias_grad, residual);
  }
  const std::int64_t rows = x.size(0), width = x.size(1);
  const at::Tensor dx = at::empty_like(x);
  const at::Tensor partial = at::empty({launch::layer_norm_partial_size(rows, width)}, weight.options());
  const OnStream on(x);
  launch::layer_norm_backward(element_of(x), dy.const_data_ptr(), x.const_data_ptr(),
                              saved.mean.const_data_ptr<float>(), saved.rstd.const_data_ptr<float>(),
                              weight.const_data_ptr<float>(), residual.defined() ? residual.const_data_ptr() : nullptr,
                              dx.data_ptr(), partial.data_ptr<float>(), weight_grad.data_ptr<float>(),
                              bias_grad.data_ptr<float>(), rows, width, on.stream());
  on.check();
  return dx;
}

at::Tensor geglu(const at::Tensor& u) {
  if (!fits(u)) return composed::geglu(u);
  const std::int64_t rows = u.size(0), half = u.size(1) / 2;
  const at::Tensor out = at::empty({rows, half}, u.options());
  const OnStream on(u);
  launch::geglu(element_of(u), u.const_data_ptr(), out.data_ptr(), rows, half, on.stream());
  on.check();
  return out;
}

at::Tensor geglu_backward(const at::Tensor& d_out, const at::Tensor& u) {
  if (!goes_with(d_out, u) || !fits(u)) return composed::geglu_backward(d_out, u);
  const std::int64_t rows = u.size(0), half = u.size(1) / 2;
  const at::Tensor du = at::empty_like(u);
  const OnStream on(u);
  launch::geglu_backward(element_of(u), d_out.const_data_ptr(), u.const_data_ptr(), du.data_ptr(), rows, half,
                         on.stream());
  on.check();
  return du;
}

// ---- attention

// Flash attention needs half precision and heads that 16-byte loads can read; 128 is where every architecture of ours
// has a backward pass.
bool fuses_attention(at::ScalarType type, std::int64_t seq, std::int64_t head_dim) {
  return type == at::kBFloat16 && seq > 0 && head_dim % 8 == 0 && head_dim <= 128;
}

bool flash_fits(const at::Tensor& qkv, std::int64_t seq, const AttentionSettings& settings) {
  const std::int64_t head_dim = settings.head_dim;
  const bool fits = fuses_attention(qkv.scalar_type(), seq, head_dim) && !settings.lengths.defined() &&
                    reinterpret_cast<std::uintptr_t>(qkv.const_data_ptr()) % 16 == 0;
  if (!fits && seq > 0 && qkv.scalar_type() == at::kBFloat16) {
    say_composed(concat("attention of heads of ", head_dim, settings.lengths.defined() ? " with padding" : "",
                        " (flash attention: full rows, multiples of 8 up to 128)"));
  }
  return fits;
}

// One of q, k, v [B,heads,S,d], a view of the rows [B*S,heads*(q,k,v)*d].
at::Tensor part_of(const at::Tensor& qkv, std::int64_t batch, std::int64_t heads, int part) {
  return qkv.view({batch, -1, heads, 3, qkv.size(1) / (3 * heads)}).select(3, part).transpose(1, 2);
}

at::Tensor attention(const at::Tensor& qkv, const AttentionSettings& settings, AttentionSaved* saved) {
  const std::int64_t batch = settings.batch, heads = settings.heads, head_dim = settings.head_dim;
  const std::int64_t seq = qkv.size(0) / batch;
  if (!flash_fits(qkv, seq, settings)) return composed::attention(qkv, settings, saved);
  const auto out = at::_scaled_dot_product_flash_attention(part_of(qkv, batch, heads, 0), part_of(qkv, batch, heads, 1),
                                                           part_of(qkv, batch, heads, 2), /*dropout_p=*/0.0,
                                                           /*is_causal=*/false, /*return_debug_mask=*/false);
  const at::Tensor& context = std::get<0>(out);  // [B,heads,S,d]; in memory [B,S,heads,d]
  if (saved != nullptr) {
    saved->qkv = qkv;
    saved->context = context;
    saved->log_sum = std::get<1>(out);  // [B,heads,S]
    saved->rng_state[0] = std::get<6>(out);
    saved->rng_state[1] = std::get<7>(out);
  }
  return context.transpose(1, 2).reshape({batch * seq, heads * head_dim});
}

at::Tensor attention_backward(const at::Tensor& d_context, const AttentionSettings& settings,
                              const AttentionSaved& saved) {
  const at::Tensor& qkv = saved.qkv;
  const std::int64_t batch = settings.batch, heads = settings.heads, head_dim = settings.head_dim;
  const std::int64_t seq = qkv.size(0) / batch;
  const at::Tensor d_heads = d_context.reshape({batch, seq, heads, head_dim}).transpose(1, 2);
  const auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_backward(
      d_heads, part_of(qkv, batch, heads, 0), part_of(qkv, batch, heads, 1), part_of(qkv, batch, heads, 2),
      saved.context, saved.log_sum, /*cum_seq_q=*/at::Tensor(), /*cum_seq_k=*/at::Tensor(), seq, seq, /*dropout_p=*/0.0,
      /*is_causal=*/false, saved.rng_state[0], saved.rng_state[1]);
  return at::stack({dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)}, /*dim=*/3).reshape(qkv.sizes());
}

// ---- sums

CrossEntropy cross_entropy_(const at::Tensor& logits, const at::Tensor& labels, bool write_gradient) {
  if (!is_long(labels) || !fits(logits)) return composed::cross_entropy_(logits, labels, write_gradient);
  const std::int64_t rows = logits.size(0), width = logits.size(1);
  const at::Tensor losses = at::empty({rows}, logits.options().dtype(at::kDouble));
  const at::Tensor correct = at::empty({write_gradient ? 0 : rows}, labels.options());
  const OnStream on(logits);
  launch::cross_entropy(element_of(logits), logits.data_ptr(), labels.const_data_ptr<std::int64_t>(),
                        losses.data_ptr<double>(), correct.data_ptr<std::int64_t>(), write_gradient, rows, width,
                        on.stream());
  on.check();
  return {losses.sum(), correct.sum()};
}

void add_to_(const at::Tensor& sum, const at::Tensor& x) {
  if (!is_float(sum) || sum.numel() != x.numel()) {
    composed::add_to_(sum, x);
    return;
  }
  const OnStream on(x);
  launch::add_to(element_of(x), sum.data_ptr<float>(), x.const_data_ptr(), x.numel(), on.stream());
  on.check();
}

void scatter_add_rows(const at::Tensor& grad, const at::Tensor& ids, const at::Tensor& d_rows, std::int64_t skip_id) {
  if (!is_float(grad) || !is_long(ids) || !fits(d_rows) || !fits(grad)) {
    composed::scatter_add_rows(grad, ids, d_rows, skip_id);
    return;
  }
  const std::int64_t rows = d_rows.size(0), width = d_rows.size(1);
  // Stable: rows of an id are added in their own order. 32-bit keys take half the passes of a radix sort.
  const auto [sorted, order] = at::sort(ids.to(at::kInt), /*stable=*/true, /*dim=*/0, /*descending=*/false);
  const at::Tensor partial = at::empty({launch::scatter_partial_size(rows, width)}, grad.options());
  const OnStream on(d_rows);
  launch::scatter_add_rows(element_of(d_rows), grad.data_ptr<float>(), sorted.const_data_ptr<std::int32_t>(),
                           order.const_data_ptr<std::int64_t>(), d_rows.const_data_ptr(), partial.data_ptr<float>(),
                           skip_id, rows, width, on.stream());
  on.check();
}

// ---- optimizer

void adamw_(const std::vector<AdamWPiece>& pieces) {
  std::vector<launch::FlatPiece> flat;
  for (const AdamWPiece& p : pieces) {
    const bool separate = p.working.defined();
    flat.push_back({.master = p.master.data_ptr<float>(),
                    .grad = p.grad.data_ptr<float>(),
                    .exp_avg = p.exp_avg.data_ptr<float>(),
                    .exp_avg_sq = p.exp_avg_sq.data_ptr<float>(),
                    .working = separate ? p.working.data_ptr() : nullptr,
                    .working_element = separate ? element_of(p.working) : launch::Element::kFloat,
                    .count = p.master.numel(),
                    .coefficients = coefficients_of<float>(p.step)});
  }
  const OnStream on(pieces.front().master);
  launch::adamw(flat, on.stream());
  on.check();
}

at::Tensor sum_of_squares(const at::Tensor& flat) {
  const at::TensorOptions wide = flat.options().dtype(at::kDouble);
  const at::Tensor partial = at::empty({launch::squares_partial_size(flat.numel())}, wide), sum = at::empty({}, wide);
  const OnStream on(flat);
  launch::sum_of_squares(flat.const_data_ptr<float>(), flat.numel(), partial.data_ptr<double>(), sum.data_ptr<double>(),
                         on.stream());
  on.check();
  return sum;
}

}  // namespace
}  // namespace cuda

constinit const Backend kCudaBackend{.name = "cuda",
                                     .takes = cuda::takes,
                                     .takes_kind = cuda::takes_kind,
                                     .fuses_attention = cuda::fuses_attention,
                                     .takes_master = cuda::takes_master,
                                     .attention = cuda::attention,
                                     .layer_norm = cuda::layer_norm,
                                     .add_layer_norm_ = cuda::add_layer_norm_,
                                     .layer_norm_backward = cuda::layer_norm_backward,
                                     .attention_backward = cuda::attention_backward,
                                     .product_transposed = cuda::product_transposed,
                                     .product = cuda::product,
                                     .add_transposed_product_ = cuda::add_transposed_product_,
                                     .add_to_ = cuda::add_to_,
                                     .geglu = cuda::geglu,
                                     .geglu_backward = cuda::geglu_backward,
                                     .scatter_add_rows = cuda::scatter_add_rows,
                                     .cross_entropy_ = cuda::cross_entropy_,
                                     .adamw_ = cuda::adamw_,
                                     .sum_of_squares = cuda::sum_of_squares};

}  // namespace cram::kernels
