// Fused kernels against the compositions of ATen operators on the shapes of a configuration, and against copying as
// many bytes.
#include <ATen/core/grad_mode.h>
#include <torch/types.h>

#include <algorithm>
#include <functional>

#include "apps/bench/bench.h"
#include "apps/bench/synthetic.h"
#include "base/log.h"
#include "model/kernels/backend.h"
#include "train/device.h"

namespace cram {
BenchResult bench_kernels(BenchContext& context) {
  const at::NoGradGuard no_grad;
  const RunDescription run = resolve_synthetic(context, Layout{});
  const Config& config = run.config;
  const DeviceChoice& choice = run.device;
  const ModelConfig& m = config.model;
  const at::TensorOptions options = at::TensorOptions().dtype(working_type(choice.precision)).device(choice.device);
  const bool rounds = choice.precision == Precision::kBf16;  // works on rounded copies of its parameters
  const at::TensorOptions wide = rounds ? options.dtype(at::kFloat) : options;
  const std::int64_t batch = config.train.micro_batch_size, tokens = batch * m.seq_length;
  const std::int64_t masked = batch * masked_in_row(config);
  const at::Tensor x = at::randn({tokens, m.hidden}, options), dy = at::randn({tokens, m.hidden}, options);
  const at::Tensor weight = at::ones({m.hidden}, wide), bias = at::zeros({m.hidden}, wide);
  const at::Tensor weight_grad = at::zeros({m.hidden}, wide), bias_grad = at::zeros({m.hidden}, wide);
  const at::Tensor u = at::randn({tokens, m.ffn}, options), d_half = at::randn({tokens, m.ffn / 2}, options);
  const at::Tensor qkv = at::randn({tokens, 3 * m.hidden}, options);
  const at::Tensor logits = at::randn({masked, m.vocab_size}, options);
  const at::Tensor labels = at::arange(masked, options.dtype(at::kLong)).remainder_(m.vocab_size);
  const at::Tensor product = at::randn({m.ffn, m.hidden}, options), sum = at::zeros({m.ffn, m.hidden}, wide);
  const auto norm = kernels::layer_norm(x, weight, bias, 1e-12);
  const kernels::AttentionSettings settings{.batch = batch, .heads = m.heads, .head_dim = m.head_dim()};
  kernels::AttentionSaved fused_saved, composed_saved;
  (void)kernels::attention(qkv, settings, &fused_saved);
  (void)kernels::composed::attention(qkv, settings, &composed_saved);
  const auto n = static_cast<double>(x.nbytes()), f = static_cast<double>(u.nbytes());
  const auto v = static_cast<double>(logits.nbytes());
  // As many parameters as a layer has.
  const std::int64_t parameters = 4 * m.hidden * m.hidden + m.hidden * (m.ffn + m.ffn / 2);
  const std::vector<kernels::AdamWPiece> pieces = {{at::randn({parameters}, wide), at::randn({parameters}, wide),
                                                    at::zeros({parameters}, wide), at::zeros({parameters}, wide),
                                                    rounds ? at::zeros({parameters}, options) : at::Tensor(),
                                                    kernels::AdamWStep{.lr = 1e-4}}};
  const at::Tensor& gradient = pieces[0].grad;
  const double copied = rounds ? static_cast<double>(pieces[0].working.nbytes()) : 0;
  const at::Tensor ids = at::arange(tokens, options.dtype(at::kLong)).mul_(17).remainder_(m.vocab_size);
  const at::Tensor table_grad = at::zeros({m.vocab_size, m.hidden}, wide);
  struct Row {
    const char* name;
    double bytes;  // read and written at least
    std::function<void()> fused, composed;
  };
  namespace composed = kernels::composed;
  const std::vector<Row> rows = {
      {"layer_norm", 2 * n, [&] { (void)kernels::layer_norm(x, weight, bias, 1e-12); },
       [&] { (void)composed::layer_norm(x, weight, bias, 1e-12); }},
      {"layer_norm_backward", 3 * n,
       [&] { (void)kernels::layer_norm_backward(dy, x, norm, weight, bias, weight_grad, bias_grad); },
       [&] { (void)composed::layer_norm_backward(dy, x, norm, weight, bias, weight_grad, bias_grad, at::Tensor()); }},
      {"geglu", 1.5 * f, [&] { (void)kernels::geglu(u); }, [&] { (void)composed::geglu(u); }},
      {"geglu_backward", 2.5 * f, [&] { (void)kernels::geglu_backward(d_half, u); },
       [&] { (void)composed::geglu_backward(d_half, u); }},
      {"attention", 4 * n, [&] { (void)kernels::attention(qkv, settings, nullptr); },
       [&] { (void)composed::attention(qkv, settings, nullptr); }},
      {"attention_backward", 7 * n, [&] { (void)kernels::attention_backward(dy, settings, fused_saved); },
       [&] { (void)composed::attention_backward(dy, settings, composed_saved); }},
      {"cross_entropy", 2 * v, [&] { (void)kernels::cross_entropy_(logits, labels, true); },
       [&] { (void)composed::cross_entropy_(logits, labels, true); }},
      {"weight_gradient", static_cast<double>(sum.nbytes()) * 2 + f + n,
       [&] { kernels::add_transposed_product_(sum, u, x); }, [&] { sum.add_(at::mm(u.t(), x)); }},
      {"add_to", static_cast<double>(2 * sum.nbytes() + product.nbytes()), [&] { kernels::add_to_(sum, product); },
       [&] { sum.add_(product); }},
      {"scatter_add_rows", 5 * n, [&] { kernels::scatter_add_rows(table_grad, ids, dy, -1); },
       [&] { composed::scatter_add_rows(table_grad, ids, dy, -1); }},
      {"sum_of_squares", static_cast<double>(gradient.nbytes()), [&] { (void)kernels::sum_of_squares(gradient); },
       [&] { (void)composed::sum_of_squares(gradient); }},
      {"adamw", static_cast<double>(8 * gradient.nbytes()) + copied, [&] { kernels::adamw_(pieces); },
       [&] { composed::adamw_(pieces); }},
  };
  const at::Tensor from = at::randn({tokens, m.hidden}, options), to = at::empty_like(from);
  const double copy_bandwidth = 2 * n / median_time_s([&] { to.copy_(from); }, 8, choice.device);
  say(choice.text(), "; copying ", static_cast<std::int64_t>(n / 1e6),
      " MB: ", static_cast<std::int64_t>(copy_bandwidth / 1e9), " GB/s");
  say("  kernel               fused ms  composed ms  ratio   GB/s  of a copy's");
  BenchResult result;
  result.add("copy_GBps", copy_bandwidth / 1e9);
  for (const Row& row : rows) {
    const double fused_s = median_time_s(row.fused, 8, choice.device);
    const double composed_s = median_time_s(row.composed, 8, choice.device);
    const double bandwidth = row.bytes / fused_s;
    char line[128];
    std::snprintf(line, sizeof line, "  %-20s %8.3f  %11.3f  %5.2f  %5.1f  %9.0f %%", row.name, 1e3 * fused_s,
                  1e3 * composed_s, composed_s / fused_s, bandwidth / 1e9, 100 * bandwidth / copy_bandwidth);
    say(line);
    result.add(std::string(row.name) + "_ratio", composed_s / fused_s);
  }
  return result;
}

}  // namespace cram
