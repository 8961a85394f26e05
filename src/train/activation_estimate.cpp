#include "train/activation_estimate.h"

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <algorithm>

#include "model/encoder.h"
#include "model/kernels/kernels.h"
#include "model/objective.h"
#include "model/parameter_store.h"

namespace cram {
namespace {

constexpr double kWide = 4;  // bytes of what sums are made in

// Elements a token.
struct LayerElements {
  double kept = 0;     // until the layer's backward pass
  double forward = 0;  // at most beside that, in passing
  double backward = 0;
};

struct Estimate {
  const Config& config;
  const ModelConfig& m = config.model;
  double working;  // bytes of an element
  kernels::Fusion fused;
  double terms_a_token;
  double hidden, outside;                  // outside: of the rows that tensor ranks may share out
  double heads_width, probabilities, ffn;  // of this tensor rank
  double logits;                           // a term
  double tokens;                           // of a micro-batch
  double rounded_product;                  // bytes an element of a composed weight gradient

  Estimate(const Config& given, const Layout& layout, double terms_a_row)
      : config(given),
        working(static_cast<double>(c10::elementSize(working_type(parse_precision(config.train.precision))))),
        fused(kernels::fusion_of(config.run.device == "cuda" ? at::kCUDA : at::kCPU,
                                 working_type(parse_precision(config.train.precision)), m.seq_length, m.head_dim())),
        terms_a_token(terms_a_row / static_cast<double>(m.seq_length)),
        hidden(static_cast<double>(m.hidden)),
        outside(config.parallel.sequence_parallel ? hidden / layout.tensor : hidden),
        heads_width(hidden / layout.tensor),
        probabilities(fused.attention ? 0 : static_cast<double>(m.heads * m.seq_length) / layout.tensor),
        ffn(static_cast<double>(m.ffn) / layout.tensor),
        // 2 H V, forward and twice back
        logits(term_flops(m, config.train.objective) / (6 * hidden) / layout.tensor),
        tokens(static_cast<double>(config.train.micro_batch_size * m.seq_length)),
        // ATen rounds the product and copies it to fp32 for the sum.
        rounded_product(fused.rows || working >= kWide ? 0 : working + kWide) {}

  // `rows` of a token: the share of rows that the layer's second half works on (the last one's picked ones).
  [[nodiscard]] LayerElements layer(double rows) const {
    const bool again = m.recompute == "selective";  // probabilities are made twice rather than kept
    // First half: the norm's input and result, q, k, v; second: the context, the second norm's input and result, the
    // FFN's intermediates.
    const double kept = outside + hidden + 3 * heads_width + (again ? 0 : probabilities) +
                        rows * (heads_width + outside + hidden + 1.5 * ffn);
    // Composed: q, k, v before and after their heads are split, scores beside probabilities.
    const double attend = fused.attention ? 0 : 3 * heads_width + (again ? 2 : 1) * probabilities;
    // Gradients of the sum, of the context and of q, k, v; composed also those of probabilities and scores, and what
    // the split makes twice.
    const double attend_backward =
        2 * outside + 4 * heads_width + (fused.attention ? 0 : 4 * heads_width + (again ? 3 : 2) * probabilities);
    const double ffn_backward =
        std::max(rows * (outside + (fused.rows ? 1.5 : 2.5) * ffn),
                 rows * (outside + ffn) + hidden * ffn * rounded_product / (tokens * working));  // dense_in's weight
    if (m.recompute != "layer") return {kept, attend, std::max(attend_backward, ffn_backward)};
    const double forward =
        std::max(hidden + 3 * heads_width + attend + probabilities, rows * (2 * outside + hidden + 1.5 * ffn));
    return {outside, forward, kept + std::max({attend, attend_backward, ffn_backward})};
  }

  // Of the objective's terms, bytes, beside what the layers keep.
  [[nodiscard]] double head() const {
    constexpr double kLossBlock = 8 << 20;  // elements: see composed::cross_entropy_
    const double terms = terms_a_token * tokens, all = terms * logits * working;
    const bool rounded = working < kWide;
    const double loss =
        fused.rows ? 0 : (rounded ? 2 : 1) * std::min(terms * logits, kLossBlock) * std::max(kWide, working);
    return terms * 3 * hidden * working + all + std::max(loss, logits * hidden * rounded_product);
  }
};

}  // namespace

double activation_bytes(const Config& config, const Layout& layout, const ActivationLoad& load) {
  if (load.blocks.empty()) return 0;
  const Estimate of(config, layout, load.terms_a_row);
  const ModelConfig& m = config.model;
  const bool sparse = last_layer_is_sparse(m, layout.tensor);
  const double bytes_a_element = of.tokens * of.working;
  double kept = 0, passing = 0;
  for (const BlockRange& block : load.blocks) {
    for (std::int64_t i = block.first_layer; i < block.end_layer; ++i) {
      const LayerElements layer = of.layer(sparse && i + 1 == m.layers ? std::min(1.0, of.terms_a_token) : 1.0);
      kept += layer.kept * bytes_a_element;
      passing = std::max(passing, std::max(layer.forward, layer.backward) * bytes_a_element);
    }
    if (block.embedding) kept += of.outside * bytes_a_element;  // its norm's input
    if (block.head) passing = std::max(passing, of.head());
  }
  return load.most_in_flight * kept / static_cast<double>(load.blocks.size()) + passing;
}

}  // namespace cram
