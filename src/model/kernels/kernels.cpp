// The one place that chooses a backend: the first of the table that takes the tensor.
#include "model/kernels/kernels.h"

#include <torch/types.h>

#include <mutex>
#include <set>

#include "base/check.h"
#include "base/log.h"
#include "model/kernels/backend.h"

namespace cram::kernels {
namespace {

const Backend* const kTable[] = {
#ifdef CRAM_CUDA
    &kCudaBackend,
#endif
    &kCpuBackend,
    &kComposedBackend,
};

const Backend& of(const at::Tensor& activation) {
  for (const Backend* backend : kTable) {
    if (backend->takes(activation)) return *backend;
  }
  return kComposedBackend;
}

const Backend& of_master(const at::Tensor& flat) {
  for (const Backend* backend : kTable) {
    if (backend->takes_master(flat)) return *backend;
  }
  return kComposedBackend;
}

}  // namespace

const char* backend_name(const at::Tensor& x) { return of(x).name; }

Fusion fusion_of(at::DeviceType device, at::ScalarType type, std::int64_t seq, std::int64_t head_dim) {
  for (const Backend* backend : kTable) {
    if (!backend->takes_kind(device, type)) continue;
    return {backend != &kComposedBackend, backend->fuses_attention(type, seq, head_dim)};
  }
  return {};
}

NormOutput layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps) {
  return of(x).layer_norm(x, weight, bias, eps);
}

NormOutput add_layer_norm_(const at::Tensor& x, const at::Tensor& branch, const at::Tensor& weight,
                           const at::Tensor& bias, double eps) {
  return of(x).add_layer_norm_(x, branch, weight, bias, eps);
}

at::Tensor layer_norm_backward(const at::Tensor& dy, const at::Tensor& x, const NormOutput& saved,
                               const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& weight_grad,
                               const at::Tensor& bias_grad, const at::Tensor& residual) {
  return of(x).layer_norm_backward(dy, x, saved, weight, bias, weight_grad, bias_grad, residual);
}

at::Tensor attention(const at::Tensor& qkv, const AttentionSettings& settings, AttentionSaved* saved,
                     const at::Tensor& picks) {
  CRAM_DCHECK(qkv.size(1) == 3 * settings.heads * settings.head_dim);
  const Backend& backend = of(qkv);
  if (saved != nullptr) saved->picks = picks;
  if (picks.defined() && backend.attention_of_rows != nullptr) {
    return backend.attention_of_rows(qkv, settings, saved, picks);
  }
  const at::Tensor context = backend.attention(qkv, settings, saved);
  return picks.defined() ? at::index_select(context, 0, picks) : context;
}

at::Tensor attention_backward(const at::Tensor& d_context, const AttentionSettings& settings,
                              const AttentionSaved& saved) {
  // What the forward pass kept says who made it.
  const Backend& backend = saved.qkv.defined() ? of(saved.qkv) : kComposedBackend;
  if (saved.pick_order.defined()) return backend.attention_of_rows_backward(d_context, settings, saved);
  if (!saved.picks.defined()) return backend.attention_backward(d_context, settings, saved);
  const std::int64_t rows = saved.qkv.defined() ? saved.qkv.size(0) : settings.batch * saved.split.size(2);
  return backend.attention_backward(put_rows(d_context, saved.picks, rows), settings, saved);
}

void say_composed(const std::string& what) {
  static std::mutex mutex;
  static std::set<std::string> said;
  const std::lock_guard lock(mutex);
  if (said.insert(what).second) log_warning(what, ": composed of plain operators, which is slower");
}

at::Tensor put_rows(const at::Tensor& picked, const at::Tensor& picks, std::int64_t rows) {
  const at::Tensor all = at::zeros({rows, picked.size(1)}, picked.options());
  // They are distinct, so the order cannot matter.
  return all.index_copy_(0, picks, picked);
}

at::Tensor product_transposed(const at::Tensor& x, const at::Tensor& weight, WeightPanels& panels) {
  return of(x).product_transposed(x, weight, panels);
}

at::Tensor product(const at::Tensor& dy, const at::Tensor& weight, WeightPanels& panels) {
  return of(dy).product(dy, weight, panels);
}

void add_transposed_product_(const at::Tensor& sum, const at::Tensor& dy, const at::Tensor& x) {
  of(dy).add_transposed_product_(sum, dy, x);
}

void add_to_(const at::Tensor& sum, const at::Tensor& x) { of(x).add_to_(sum, x); }

at::Tensor geglu(const at::Tensor& u) { return of(u).geglu(u); }

at::Tensor geglu_backward(const at::Tensor& d_out, const at::Tensor& u) { return of(u).geglu_backward(d_out, u); }

void scatter_add_rows(const at::Tensor& grad, const at::Tensor& ids, const at::Tensor& d_rows, std::int64_t skip_id) {
  of(d_rows).scatter_add_rows(grad, ids, d_rows, skip_id);
}

CrossEntropy cross_entropy_(const at::Tensor& logits, const at::Tensor& labels, bool write_gradient) {
  return of(logits).cross_entropy_(logits, labels, write_gradient);
}

void adamw_(const std::vector<AdamWPiece>& pieces) {
  if (!pieces.empty()) of_master(pieces.front().master).adamw_(pieces);
}

at::Tensor sum_of_squares(const at::Tensor& flat) { return of_master(flat).sum_of_squares(flat); }

}  // namespace cram::kernels
