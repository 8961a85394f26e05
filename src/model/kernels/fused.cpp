// Chooses between the fused kernels and the compositions, and shares the fused ones' rows, heads and columns out to
// threads.
#include <ATen/Parallel.h>
#include <torch/types.h>

#include "model/kernels/avx512.h"
#include "model/kernels/cpu_attention.h"
#include "model/kernels/kernels.h"
#include "model/kernels/panels.h"
#include "model/kernels/thread_scratch.h"

namespace cram::kernels {
namespace {

// Rows whose weight gradients are summed together before the sums are: fixed, so that the bits do not depend on
// threads.
constexpr std::int64_t kNormChunk = 128;

avx512::bf16* data(const at::Tensor& tensor) {
  return reinterpret_cast<avx512::bf16*>(tensor.data_ptr<at::BFloat16>());
}
const avx512::bf16* const_data(const at::Tensor& tensor) {
  return reinterpret_cast<const avx512::bf16*>(tensor.const_data_ptr<at::BFloat16>());
}

// Rows in pieces of about this many elements.
std::int64_t rows_at_a_time(std::int64_t width) {
  return std::max<std::int64_t>(1, 32768 / std::max<std::int64_t>(1, width));
}

bool is_float(const at::Tensor& tensor) { return tensor.scalar_type() == at::kFloat && tensor.is_contiguous(); }

NormOutput fused_layer_norm(const at::Tensor& x, const at::Tensor& branch, const at::Tensor& weight,
                            const at::Tensor& bias, double eps) {
  const std::int64_t rows = x.size(0), width = x.size(1);
  const at::TensorOptions wide = x.options().dtype(at::kFloat);
  NormOutput out{at::empty_like(x), at::empty({rows, 1}, wide), at::empty({rows, 1}, wide)};
  at::parallel_for(0, rows, rows_at_a_time(width), [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t at = begin * width;
    avx512::layer_norm(data(x) + at, branch.defined() ? const_data(branch) + at : nullptr,
                       weight.const_data_ptr<float>(), bias.const_data_ptr<float>(), static_cast<float>(eps),
                       data(out.y) + at, out.mean.data_ptr<float>() + begin, out.rstd.data_ptr<float>() + begin,
                       end - begin, width);
  });
  return out;
}

}  // namespace

bool uses_fused(const at::Tensor& x) {
  static const bool supported = avx512::is_supported();
  return supported && x.is_cpu() && x.scalar_type() == at::kBFloat16 && x.is_contiguous();
}

NormOutput layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps) {
  if (!uses_fused(x) || !is_float(weight)) return composed::layer_norm(x, weight, bias, eps);
  return fused_layer_norm(x, at::Tensor(), weight, bias, eps);
}

NormOutput add_layer_norm_(const at::Tensor& x, const at::Tensor& branch, const at::Tensor& weight,
                           const at::Tensor& bias, double eps) {
  if (!uses_fused(x) || !uses_fused(branch) || !is_float(weight)) {
    x.add_(branch);
    return composed::layer_norm(x, weight, bias, eps);
  }
  return fused_layer_norm(x, branch, weight, bias, eps);
}

at::Tensor layer_norm_backward(const at::Tensor& dy, const at::Tensor& x, const NormOutput& saved,
                               const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& weight_grad,
                               const at::Tensor& bias_grad, const at::Tensor& residual) {
  if (!uses_fused(dy) || !uses_fused(x) || !is_float(weight)) {
    return composed::layer_norm_backward(dy, x, saved, weight, bias, weight_grad, bias_grad, residual);
  }
  const std::int64_t rows = x.size(0), width = x.size(1);
  const std::int64_t chunks = (rows + kNormChunk - 1) / kNormChunk;
  const at::Tensor dx = at::empty_like(x);
  const at::Tensor partial = at::empty({2, chunks, width}, weight.options());
  auto* weight_parts = partial.data_ptr<float>();
  auto* bias_parts = weight_parts + chunks * width;
  const avx512::bf16* beside = residual.defined() ? const_data(residual) : nullptr;
  at::parallel_for(0, chunks, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t chunk = first; chunk < last; ++chunk) {
      const std::int64_t begin = chunk * kNormChunk, at = begin * width;
      avx512::layer_norm_backward(const_data(dy) + at, const_data(x) + at, saved.mean.const_data_ptr<float>() + begin,
                                  saved.rstd.const_data_ptr<float>() + begin, weight.const_data_ptr<float>(),
                                  beside != nullptr ? beside + at : nullptr, data(dx) + at,
                                  weight_parts + chunk * width, bias_parts + chunk * width,
                                  std::min(kNormChunk, rows - begin), width);
    }
  });
  if (chunks > 0) {
    weight_grad.add_(partial[0].sum(0));
    bias_grad.add_(partial[1].sum(0));
  }
  return dx;
}

at::Tensor geglu(const at::Tensor& u) {
  if (!uses_fused(u)) return composed::geglu(u);
  const std::int64_t rows = u.size(0), half = u.size(1) / 2;
  const at::Tensor out = at::empty({rows, half}, u.options());
  at::parallel_for(0, rows, rows_at_a_time(half), [&](std::int64_t begin, std::int64_t end) {
    avx512::geglu(const_data(u) + begin * 2 * half, data(out) + begin * half, end - begin, half);
  });
  return out;
}

at::Tensor geglu_backward(const at::Tensor& d_out, const at::Tensor& u) {
  if (!uses_fused(u) || !uses_fused(d_out)) return composed::geglu_backward(d_out, u);
  const std::int64_t rows = u.size(0), half = u.size(1) / 2;
  const at::Tensor du = at::empty_like(u);
  at::parallel_for(0, rows, rows_at_a_time(half), [&](std::int64_t begin, std::int64_t end) {
    avx512::geglu_backward(const_data(d_out) + begin * half, const_data(u) + begin * 2 * half,
                           data(du) + begin * 2 * half, end - begin, half);
  });
  return du;
}

at::Tensor attention(const at::Tensor& qkv, std::int64_t batch, std::int64_t heads, bool keep_probabilities,
                     AttentionSaved* saved) {
  const std::int64_t seq = qkv.size(0) / batch, head_dim = qkv.size(1) / (3 * heads);
  const HeadShape shape{seq, head_dim, qkv.size(1), heads * head_dim};
  if (!uses_fused(qkv) || !shape.fits()) return composed::attention(qkv, batch, heads, keep_probabilities, saved);
  const at::Tensor context = at::empty({batch * seq, heads * head_dim}, qkv.options());
  const at::Tensor log_sum = at::empty({batch * heads, seq}, qkv.options().dtype(at::kFloat));
  const ThreadScratch scratch(shape.scratch_bytes());
  at::parallel_for(0, batch * heads, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) {
      const std::int64_t row = i / heads * seq, head = i % heads;
      attend_head(shape, const_data(qkv) + row * shape.stride + head * 3 * head_dim,
                  data(context) + row * shape.context_stride + head * head_dim, log_sum.data_ptr<float>() + i * seq,
                  scratch.mine());
    }
    release_attention();
  });
  if (saved != nullptr) {
    saved->qkv = qkv;
    saved->log_sum = log_sum;
  }
  return context;
}

at::Tensor attention_backward(const at::Tensor& d_context, std::int64_t batch, std::int64_t heads,
                              const AttentionSaved& saved) {
  if (!saved.qkv.defined()) return composed::attention_backward(d_context, batch, heads, saved);
  const at::Tensor& qkv = saved.qkv;
  const std::int64_t seq = qkv.size(0) / batch, head_dim = qkv.size(1) / (3 * heads);
  const HeadShape shape{seq, head_dim, qkv.size(1), heads * head_dim};
  const at::Tensor d_rows = d_context.contiguous();
  const at::Tensor d_qkv = at::empty_like(qkv);
  const ThreadScratch scratch(shape.scratch_bytes());
  at::parallel_for(0, batch * heads, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) {
      const std::int64_t row = i / heads * seq, head = i % heads;
      const std::int64_t at = row * shape.stride + head * 3 * head_dim;
      attend_head_backward(shape, const_data(qkv) + at,
                           const_data(d_rows) + row * shape.context_stride + head * head_dim,
                           saved.log_sum.const_data_ptr<float>() + i * seq, data(d_qkv) + at, scratch.mine());
    }
    release_attention();
  });
  return d_qkv;
}

CrossEntropy cross_entropy_(const at::Tensor& logits, const at::Tensor& labels, bool write_gradient) {
  if (!uses_fused(logits)) return composed::cross_entropy_(logits, labels, write_gradient);
  const std::int64_t rows = logits.size(0), width = logits.size(1);
  const auto* label = labels.const_data_ptr<std::int64_t>();
  const at::Tensor losses = at::empty({rows}, at::kDouble), correct = at::zeros({rows}, at::kLong);
  auto* loss = losses.data_ptr<double>();
  auto* hits = correct.data_ptr<std::int64_t>();
  at::parallel_for(0, rows, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      avx512::bf16* row = data(logits) + r * width;
      if (!write_gradient) hits[r] = avx512::is_largest(row, width, label[r]) ? 1 : 0;
      loss[r] = avx512::cross_entropy_row(row, width, label[r], write_gradient);
    }
  });
  return {losses.sum(), correct.sum()};
}

at::Tensor product_transposed(const at::Tensor& x, const at::Tensor& weight, WeightPanels& panels) {
  if (!panels_fit(x, weight, weight.size(1))) return at::mm(x, weight.t());
  return multiply_panels(x, panels.transposed(weight), weight.size(0));
}

at::Tensor product(const at::Tensor& dy, const at::Tensor& weight, WeightPanels& panels) {
  if (!panels_fit(dy, weight, weight.size(0))) return at::mm(dy, weight);
  return multiply_panels(dy, panels.plain(weight), weight.size(1));
}

void add_transposed_product_(const at::Tensor& sum, const at::Tensor& dy, const at::Tensor& x) {
  const std::int64_t tokens = dy.size(0), out = dy.size(1), in = x.size(1);
  const bool fused = uses_fused(dy) && uses_fused(x) && is_float(sum) && tokens % 2 == 0;
  if (fused && has_amx()) {
    add_transposed_product_by_tiles(sum, dy, x);
    return;
  }
  if (!fused || !avx512::transposed_product_fits(tokens, out, in)) {
    if (sum.scalar_type() == x.scalar_type()) {
      at::Tensor target = sum;
      at::addmm_out(target, sum, dy.t(), x);
    } else {
      add_to_(sum, at::mm(dy.t(), x));  // a rounded product, a wide sum
    }
    return;
  }
  constexpr std::int64_t kRows = 48;  // of the gradient; what the kernel packs at a time
  const ThreadScratch scratch(avx512::transposed_product_scratch_bytes(in));
  at::parallel_for(0, (out + kRows - 1) / kRows, 1, [&](std::int64_t first, std::int64_t last) {
    avx512::add_transposed_product(const_data(dy), const_data(x), sum.data_ptr<float>(), tokens, out, in, first * kRows,
                                   std::min(last * kRows, out), scratch.mine());
  });
}

void add_to_(const at::Tensor& sum, const at::Tensor& x) {
  if (!uses_fused(x) || !is_float(sum)) {
    sum.add_(x);
    return;
  }
  at::parallel_for(0, x.numel(), 1 << 15, [&](std::int64_t begin, std::int64_t end) {
    avx512::add_to(sum.data_ptr<float>() + begin, const_data(x) + begin, end - begin);
  });
}

void scatter_add_rows(const at::Tensor& grad, const at::Tensor& ids, const at::Tensor& d_rows, std::int64_t skip_id) {
  if (uses_fused(d_rows) && is_float(grad) && ids.is_contiguous()) {
    // Every thread has some columns of all rows, so rows are added in their order whatever the number of threads.
    const std::int64_t rows = d_rows.size(0), width = d_rows.size(1);
    const auto* id = ids.const_data_ptr<std::int64_t>();
    auto* sums = grad.data_ptr<float>();
    at::parallel_for(0, (width + 63) / 64, 1, [&](std::int64_t first, std::int64_t last) {
      const std::int64_t begin = first * 64, end = std::min(last * 64, width);
      for (std::int64_t r = 0; r < rows; ++r) {
        if (id[r] == skip_id || id[r] < 0) continue;
        avx512::add_to(sums + id[r] * width + begin, const_data(d_rows) + r * width + begin, end - begin);
      }
    });
    return;
  }
  // Rows of the skipped id are zeroed rather than removed: no data-dependent shape, so no host synchronisation.
  const at::Tensor kept = d_rows.to(grad.scalar_type()) * ids.ne(skip_id).unsqueeze(1);
  grad.index_add_(0, ids.clamp_min(0), kept);
}

}  // namespace cram::kernels
