// Shape of the encoder: settings, their option rows, and what follows from them (parameters, FLOPs).
#pragma once

#include <cstdint>
#include <string>

#include "base/options.h"

namespace cram {

/// Defaults are crammed-bert (Geiping & Goldstein, ICML 2023): 119.6 M parameters.
struct ModelConfig {
  std::int64_t layers = 16;
  std::int64_t hidden = 768;
  std::int64_t heads = 12;
  std::int64_t ffn = 3072;      ///< rows of dense_in; the gated half is ffn/2 wide
  std::int64_t vocab_size = 0;  ///< 0 = the shards' value
  std::int64_t seq_length = 0;  ///< 0 = the shards' value
  double dropout = 0;
  std::string preset = "crammed-bert";
  std::string positions = "sinusoidal";
  std::string structure = "dense";
  std::string recompute = "none";

  [[nodiscard]] std::int64_t head_dim() const { return hidden / heads; }
};

inline constexpr double kLayerNormEps = 1e-12;
inline constexpr double kInitStddev = 0.02;

void add_model_options(OptionTable& table, ModelConfig& config);

/// Throws Error(kUsage) unless every size is positive, heads divides hidden, ffn is even, and the position form can do
/// this model.
/// vocab_size and seq_length must be resolved.
void check_model_config(const ModelConfig& config);
/// Throws Error(kUsage), with the legal sizes, unless tensor groups of `ranks` can share heads and FFN evenly.
void check_tensor_ranks(const ModelConfig& config, int ranks);

/// Matrix-multiply FLOPs of one layer for one training token, forward and backward (3 x forward): linears by their
/// structure (2*in*out where dense), attention 4*S*H.
[[nodiscard]] double layer_flops_per_token(const ModelConfig& config);
/// The same of the objective's head for one term of its loss (a masked token's decoder: 2*H*V).
[[nodiscard]] double term_flops(const ModelConfig& config, const std::string& objective);
/// Of one training token with `terms_per_row` terms of the loss in S tokens. 622,854,144 for the defaults at V = 32768,
/// S = 128, 32 masked.
[[nodiscard]] double train_flops_per_token(const ModelConfig& config, std::int64_t terms_per_row,
                                           const std::string& objective = "mlm");

}  // namespace cram
