// The CPU backend: shares rows, heads and columns of the AVX512-BF16 kernels out to threads.
#include "model/kernels/cpu.h"

#include <ATen/Parallel.h>
#include <torch/types.h>

#include <algorithm>
#include <vector>

#include "base/check.h"
#include "model/kernels/backend.h"
#include "model/kernels/cpu_attention.h"
#include "model/kernels/thread_scratch.h"

namespace cram::kernels {
namespace cpu {

namespace {
bool takes_kind(at::DeviceType device, at::ScalarType type) {
  static const bool supported = avx512::is_supported();
  return supported && device == at::kCPU && type == at::kBFloat16;
}
}  // namespace

bool takes(const at::Tensor& x) { return takes_kind(x.device().type(), x.scalar_type()) && x.is_contiguous(); }

namespace {

bool takes_master(const at::Tensor& flat) { return flat.is_cpu() && flat.is_contiguous(); }

// Rows whose weight gradients are summed together before the sums are: fixed, so that the bits do not depend on
// threads.
constexpr std::int64_t kNormChunk = 128;

// Rows in pieces of about this many elements.
std::int64_t rows_at_a_time(std::int64_t width) {
  return std::max<std::int64_t>(1, 32768 / std::max<std::int64_t>(1, width));
}

NormOutput norm_rows(const at::Tensor& x, const at::Tensor& branch, const at::Tensor& weight, const at::Tensor& bias,
                     double eps) {
  const std::int64_t rows = x.size(0), width = x.size(1);
  const at::TensorOptions wide = x.options().dtype(at::kFloat);
  NormOutput out{at::empty_like(x), at::empty({rows, 1}, wide), at::empty({rows, 1}, wide)};
  at::parallel_for(0, rows, rows_at_a_time(width), [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t at = begin * width;
    avx512::layer_norm(data(x) + at, branch.defined() ? const_data(branch) : nullptr,
                       branch.defined() ? branch.size(0) : 1, begin, weight.const_data_ptr<float>(),
                       bias.const_data_ptr<float>(), static_cast<float>(eps), data(out.y) + at,
                       out.mean.data_ptr<float>() + begin, out.rstd.data_ptr<float>() + begin, end - begin, width);
  });
  return out;
}

NormOutput layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps) {
  if (!is_float(weight)) return composed::layer_norm(x, weight, bias, eps);
  return norm_rows(x, at::Tensor(), weight, bias, eps);
}

NormOutput add_layer_norm_(const at::Tensor& x, const at::Tensor& branch, const at::Tensor& weight,
                           const at::Tensor& bias, double eps) {
  if (!takes(branch) || !is_float(weight)) return composed::add_layer_norm_(x, branch, weight, bias, eps);
  return norm_rows(x, branch, weight, bias, eps);
}

at::Tensor layer_norm_backward(const at::Tensor& dy, const at::Tensor& x, const NormOutput& saved,
                               const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& weight_grad,
                               const at::Tensor& bias_grad, const at::Tensor& residual) {
  if (!takes(dy) || (residual.defined() && !takes(residual)) || !is_float(weight)) {
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
  const std::int64_t rows = u.size(0), half = u.size(1) / 2;
  const at::Tensor out = at::empty({rows, half}, u.options());
  at::parallel_for(0, rows, rows_at_a_time(half), [&](std::int64_t begin, std::int64_t end) {
    avx512::geglu(const_data(u) + begin * 2 * half, data(out) + begin * half, end - begin, half);
  });
  return out;
}

at::Tensor geglu_backward(const at::Tensor& d_out, const at::Tensor& u) {
  if (!takes(d_out)) return composed::geglu_backward(d_out, u);
  const std::int64_t rows = u.size(0), half = u.size(1) / 2;
  const at::Tensor du = at::empty_like(u);
  at::parallel_for(0, rows, rows_at_a_time(half), [&](std::int64_t begin, std::int64_t end) {
    avx512::geglu_backward(const_data(d_out) + begin * half, const_data(u) + begin * 2 * half,
                           data(du) + begin * 2 * half, end - begin, half);
  });
  return du;
}

HeadShape shape_of(const at::Tensor& qkv, const AttentionSettings& settings) {
  const std::int64_t seq = qkv.size(0) / settings.batch;
  return {seq, settings.head_dim, seq, qkv.size(1), settings.heads * settings.head_dim};
}

bool fuses_attention(at::ScalarType /*type*/, std::int64_t seq, std::int64_t head_dim) {
  return HeadShape{.seq = seq, .head_dim = head_dim}.fits();
}

// False, with a word about it, where the sizes are not for these kernels.
bool fits(const HeadShape& shape, const AttentionSettings& settings) {
  const bool lengths_fit =
      !settings.lengths.defined() || (settings.lengths.is_contiguous() && settings.lengths.scalar_type() == at::kLong);
  if (shape.fits() && lengths_fit) return true;
  if (shape.seq > 0) {
    say_composed(concat("attention of rows of ", shape.seq, " tokens, heads of ", shape.head_dim,
                        " (fused: even numbers up to 512 and 128)"));
  }
  return false;
}

// The same with the keys of a row of the batch.
HeadShape shape_of_row(HeadShape shape, const AttentionSettings& settings, std::int64_t row) {
  if (settings.lengths.defined()) shape.keys = settings.lengths.const_data_ptr<std::int64_t>()[row];
  return shape;
}

// A head of a row of the batch: where it is in qkv and in that row's part of log_sum [B*heads,S]; its columns in a
// context.
struct Head {
  std::int64_t row, qkv, column, log_sum;
};

// call(head, scratch) for all heads of all rows, shared out to the threads.
template <class Call>
void for_each_head(const HeadShape& shape, const AttentionSettings& settings, const Call& call) {
  const std::int64_t heads = settings.heads;
  const ThreadScratch scratch(shape.scratch_bytes());
  at::parallel_for(0, settings.batch * heads, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) {
      const std::int64_t row = i / heads, column = i % heads * shape.head_dim;
      call(Head{row, row * shape.seq * shape.stride + 3 * column, column, i * shape.seq}, scratch.mine());
    }
    release_attention();
  });
}

at::Tensor attention(const at::Tensor& qkv, const AttentionSettings& settings, AttentionSaved* saved) {
  const HeadShape shape = shape_of(qkv, settings);
  if (!fits(shape, settings)) return composed::attention(qkv, settings, saved);
  const at::Tensor context = at::empty({qkv.size(0), shape.context_stride}, qkv.options());
  const at::Tensor log_sum = at::empty({settings.batch * settings.heads, shape.seq}, qkv.options().dtype(at::kFloat));
  for_each_head(shape, settings, [&](const Head& head, void* scratch) {
    attend_head(shape_of_row(shape, settings, head.row), const_data(qkv) + head.qkv,
                data(context) + head.row * shape.seq * shape.context_stride + head.column,
                log_sum.data_ptr<float>() + head.log_sum, scratch);
  });
  if (saved != nullptr) {
    saved->qkv = qkv;
    saved->log_sum = log_sum;
  }
  return context;
}

at::Tensor attention_backward(const at::Tensor& d_context, const AttentionSettings& settings,
                              const AttentionSaved& saved) {
  const at::Tensor& qkv = saved.qkv;
  const HeadShape shape = shape_of(qkv, settings);
  const at::Tensor d_rows = d_context.contiguous();
  const at::Tensor d_qkv = at::empty_like(qkv);
  for_each_head(shape, settings, [&](const Head& head, void* scratch) {
    attend_head_backward(shape_of_row(shape, settings, head.row), const_data(qkv) + head.qkv,
                         const_data(d_rows) + head.row * shape.seq * shape.context_stride + head.column,
                         saved.log_sum.const_data_ptr<float>() + head.log_sum, data(d_qkv) + head.qkv, scratch);
  });
  return d_qkv;
}

// Picks by row of the batch, in their order there: [M] numbers, [B+1] where each row's begin.
void group_picks(const at::Tensor& picks, std::int64_t batch, std::int64_t seq, AttentionSaved& saved) {
  saved.pick_order = at::empty_like(picks);
  saved.pick_begins = at::zeros({batch + 1}, picks.options());
  const auto* pick = picks.const_data_ptr<std::int64_t>();
  auto* order = saved.pick_order.data_ptr<std::int64_t>();
  auto* begins = saved.pick_begins.data_ptr<std::int64_t>();
  const std::int64_t count = picks.numel();
  for (std::int64_t i = 0; i < count; ++i) ++begins[pick[i] / seq + 1];
  for (std::int64_t b = 0; b < batch; ++b) begins[b + 1] += begins[b];
  std::vector<std::int64_t> next(begins, begins + batch);
  for (std::int64_t i = 0; i < count; ++i) order[next[static_cast<std::size_t>(pick[i] / seq)]++] = i;
}

HeadPicks picks_of_row(const AttentionSaved& saved, std::int64_t row, std::int64_t seq) {
  const auto* begins = saved.pick_begins.const_data_ptr<std::int64_t>();
  return {saved.picks.const_data_ptr<std::int64_t>(), saved.pick_order.const_data_ptr<std::int64_t>() + begins[row],
          begins[row + 1] - begins[row], row * seq};
}

at::Tensor attention_of_rows(const at::Tensor& qkv, const AttentionSettings& settings, AttentionSaved* saved,
                             const at::Tensor& picks) {
  const std::int64_t batch = settings.batch, heads = settings.heads;
  const HeadShape shape = shape_of(qkv, settings);
  if (!fits(shape, settings)) return at::index_select(composed::attention(qkv, settings, saved), 0, picks);
  AttentionSaved own;
  AttentionSaved& kept = saved != nullptr ? *saved : own;
  kept.picks = picks.contiguous();
  group_picks(kept.picks, batch, shape.seq, kept);
  const at::Tensor context = at::empty({picks.numel(), shape.context_stride}, qkv.options());
  kept.log_sum = at::empty({batch * heads, shape.seq}, qkv.options().dtype(at::kFloat));  // of the picked rows
  kept.qkv = qkv;
  for_each_head(shape, settings, [&](const Head& head, void* scratch) {
    attend_picked(shape_of_row(shape, settings, head.row), picks_of_row(kept, head.row, shape.seq),
                  const_data(qkv) + head.qkv, data(context) + head.column,
                  kept.log_sum.data_ptr<float>() + head.log_sum, scratch);
  });
  return context;
}

at::Tensor attention_of_rows_backward(const at::Tensor& d_context, const AttentionSettings& settings,
                                      const AttentionSaved& saved) {
  const at::Tensor& qkv = saved.qkv;
  const HeadShape shape = shape_of(qkv, settings);
  const at::Tensor d_rows = d_context.contiguous();
  const at::Tensor d_qkv = at::empty_like(qkv);
  for_each_head(shape, settings, [&](const Head& head, void* scratch) {
    attend_picked_backward(shape_of_row(shape, settings, head.row), picks_of_row(saved, head.row, shape.seq),
                           const_data(qkv) + head.qkv, const_data(d_rows) + head.column,
                           saved.log_sum.const_data_ptr<float>() + head.log_sum, data(d_qkv) + head.qkv, scratch);
  });
  return d_qkv;
}

CrossEntropy cross_entropy_(const at::Tensor& logits, const at::Tensor& labels, bool write_gradient) {
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

void add_to_(const at::Tensor& sum, const at::Tensor& x) {
  if (!is_float(sum)) {
    composed::add_to_(sum, x);
    return;
  }
  at::parallel_for(0, x.numel(), 1 << 15, [&](std::int64_t begin, std::int64_t end) {
    avx512::add_to(sum.data_ptr<float>() + begin, const_data(x) + begin, end - begin);
  });
}

void scatter_add_rows(const at::Tensor& grad, const at::Tensor& ids, const at::Tensor& d_rows, std::int64_t skip_id) {
  if (!is_float(grad) || !ids.is_contiguous()) {
    composed::scatter_add_rows(grad, ids, d_rows, skip_id);
    return;
  }
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
}

}  // namespace
}  // namespace cpu

constinit const Backend kCpuBackend{.name = "cpu",
                                    .takes = cpu::takes,
                                    .takes_kind = cpu::takes_kind,
                                    .fuses_attention = cpu::fuses_attention,
                                    .takes_master = cpu::takes_master,
                                    .attention = cpu::attention,
                                    .attention_of_rows = cpu::attention_of_rows,
                                    .attention_of_rows_backward = cpu::attention_of_rows_backward,
                                    .layer_norm = cpu::layer_norm,
                                    .add_layer_norm_ = cpu::add_layer_norm_,
                                    .layer_norm_backward = cpu::layer_norm_backward,
                                    .attention_backward = cpu::attention_backward,
                                    .product_transposed = cpu::product_transposed,
                                    .product = cpu::product,
                                    .add_transposed_product_ = cpu::add_transposed_product_,
                                    .add_to_ = cpu::add_to_,
                                    .geglu = cpu::geglu,
                                    .geglu_backward = cpu::geglu_backward,
                                    .scatter_add_rows = cpu::scatter_add_rows,
                                    .cross_entropy_ = cpu::cross_entropy_,
                                    .adamw_ = cpu::adamw_,
                                    .sum_of_squares = cpu::sum_of_squares};

}  // namespace cram::kernels
