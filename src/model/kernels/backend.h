// What a set of kernels has to offer, and the sets there are. A new one is a file with a row like these and an entry in
// the table of kernels.cpp, which is the only place that chooses.
#pragma once

#include "model/kernels/kernels.h"

/// The operations that backends may have their own version of, each named once: its composition and the backends'
/// member are declared from here, with the signature of kernels.h.
#define CRAM_KERNELS(OPERATION)      \
  OPERATION(layer_norm)              \
  OPERATION(add_layer_norm_)         \
  OPERATION(layer_norm_backward)     \
  OPERATION(attention_backward)      \
  OPERATION(product_transposed)      \
  OPERATION(product)                 \
  OPERATION(add_transposed_product_) \
  OPERATION(add_to_)                 \
  OPERATION(geglu)                   \
  OPERATION(geglu_backward)          \
  OPERATION(scatter_add_rows)        \
  OPERATION(cross_entropy_)          \
  OPERATION(adamw_)                  \
  OPERATION(sum_of_squares)

namespace cram::kernels {

/// The compositions of ATen operators: the oracle of the others.
namespace composed {

/// Of all rows; kernels::attention picks.
[[nodiscard]] at::Tensor attention(const at::Tensor& qkv, const AttentionSettings& settings, AttentionSaved* saved);
#define CRAM_DECLARE_COMPOSED(operation) decltype(kernels::operation) operation;
CRAM_KERNELS(CRAM_DECLARE_COMPOSED)
#undef CRAM_DECLARE_COMPOSED

}  // namespace composed

/// A set of kernels for some kind of tensors: a row names what it has its own version of, the rest is composed. A
/// version that cannot do a size or a mix of formats calls `composed` itself, and says so once (say_composed) where
/// that is slow.
struct Backend {
  const char* name;
  bool (*takes)(const at::Tensor& activation);                     ///< by device, dtype, strides
  bool (*takes_kind)(at::DeviceType device, at::ScalarType type);  ///< whether it takes any tensor of such
  bool (*fuses_attention)(at::ScalarType type, std::int64_t seq, std::int64_t head_dim);  ///< or runs it composed
  bool (*takes_master)(const at::Tensor& flat);  ///< masters, states and gradients

  decltype(&composed::attention) attention = composed::attention;
  /// Of picked rows alone; nullptr: all rows are done and the picked ones taken.
  at::Tensor (*attention_of_rows)(const at::Tensor& qkv, const AttentionSettings& settings, AttentionSaved* saved,
                                  const at::Tensor& picks) = nullptr;
  at::Tensor (*attention_of_rows_backward)(const at::Tensor& d_context, const AttentionSettings& settings,
                                           const AttentionSaved& saved) = nullptr;
#define CRAM_DECLARE_MEMBER(operation) decltype(&kernels::operation) operation = composed::operation;
  CRAM_KERNELS(CRAM_DECLARE_MEMBER)
#undef CRAM_DECLARE_MEMBER
};

/// AVX512-BF16 for activations, portable loops for the optimizer.
extern const Backend kCpuBackend;
/// A GPU, bf16 and fp32. Only in a build with CUDA.
extern const Backend kCudaBackend;
/// Takes every tensor.
extern const Backend kComposedBackend;

/// Warns, once for each text in a process, that an operation runs composed although its tensors have fused kernels.
void say_composed(const std::string& what);

}  // namespace cram::kernels
