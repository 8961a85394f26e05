// What a set of kernels has to offer, and the sets there are. A new one is a file with a row like these and an entry in
// the table of kernels.cpp, which is the only place that chooses.
#pragma once

#include "model/kernels/kernels.h"

namespace cram::kernels {

/// The operations of kernels.h for some kind of tensors. A backend that cannot do a size or a mix of formats calls
/// `composed` itself.
struct Backend {
  const char* name;
  bool (*takes)(const at::Tensor& activation);   ///< by device, dtype, strides
  bool (*takes_master)(const at::Tensor& flat);  ///< masters, moments and gradients

  NormOutput (*layer_norm)(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps);
  NormOutput (*add_layer_norm_)(const at::Tensor& x, const at::Tensor& branch, const at::Tensor& weight,
                                const at::Tensor& bias, double eps);
  at::Tensor (*layer_norm_backward)(const at::Tensor& dy, const at::Tensor& x, const NormOutput& saved,
                                    const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& weight_grad,
                                    const at::Tensor& bias_grad, const at::Tensor& residual);
  at::Tensor (*attention)(const at::Tensor& qkv, std::int64_t batch, std::int64_t heads, bool keep_probabilities,
                          AttentionSaved* saved);
  at::Tensor (*attention_backward)(const at::Tensor& d_context, std::int64_t batch, std::int64_t heads,
                                   const AttentionSaved& saved);
  /// Of picked rows alone; nullptr: all rows are done and the picked ones taken.
  at::Tensor (*attention_of_rows)(const at::Tensor& qkv, std::int64_t batch, std::int64_t heads,
                                  bool keep_probabilities, AttentionSaved* saved, const at::Tensor& picks);
  at::Tensor (*attention_of_rows_backward)(const at::Tensor& d_context, std::int64_t batch, std::int64_t heads,
                                           const AttentionSaved& saved);
  at::Tensor (*product_transposed)(const at::Tensor& x, const at::Tensor& weight, WeightPanels& panels);
  at::Tensor (*product)(const at::Tensor& dy, const at::Tensor& weight, WeightPanels& panels);
  void (*add_transposed_product_)(const at::Tensor& sum, const at::Tensor& dy, const at::Tensor& x);
  void (*add_to_)(const at::Tensor& sum, const at::Tensor& x);
  at::Tensor (*geglu)(const at::Tensor& u);
  at::Tensor (*geglu_backward)(const at::Tensor& d_out, const at::Tensor& u);
  void (*scatter_add_rows)(const at::Tensor& grad, const at::Tensor& ids, const at::Tensor& d_rows,
                           std::int64_t skip_id);
  CrossEntropy (*cross_entropy_)(const at::Tensor& logits, const at::Tensor& labels, bool write_gradient);
  void (*adamw_)(const std::vector<AdamWPiece>& pieces);
  at::Tensor (*sum_of_squares)(const at::Tensor& flat);
};

/// AVX512-BF16 for activations, portable loops for the optimizer.
extern const Backend kCpuBackend;
/// A GPU, bf16 and fp32. Only in a build with CUDA.
extern const Backend kCudaBackend;
/// Takes every tensor.
extern const Backend kComposedBackend;

/// The compositions of ATen operators: the oracle of the others.
namespace composed {

[[nodiscard]] NormOutput layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps);
[[nodiscard]] NormOutput add_layer_norm_(const at::Tensor& x, const at::Tensor& branch, const at::Tensor& weight,
                                         const at::Tensor& bias, double eps);
[[nodiscard]] at::Tensor layer_norm_backward(const at::Tensor& dy, const at::Tensor& x, const NormOutput& saved,
                                             const at::Tensor& weight, const at::Tensor& bias,
                                             const at::Tensor& weight_grad, const at::Tensor& bias_grad,
                                             const at::Tensor& residual);
[[nodiscard]] at::Tensor attention(const at::Tensor& qkv, std::int64_t batch, std::int64_t heads,
                                   bool keep_probabilities, AttentionSaved* saved);
[[nodiscard]] at::Tensor attention_backward(const at::Tensor& d_context, std::int64_t batch, std::int64_t heads,
                                            const AttentionSaved& saved);
[[nodiscard]] at::Tensor product_transposed(const at::Tensor& x, const at::Tensor& weight, WeightPanels& panels);
[[nodiscard]] at::Tensor product(const at::Tensor& dy, const at::Tensor& weight, WeightPanels& panels);
void add_transposed_product_(const at::Tensor& sum, const at::Tensor& dy, const at::Tensor& x);
void add_to_(const at::Tensor& sum, const at::Tensor& x);
[[nodiscard]] at::Tensor geglu(const at::Tensor& u);
[[nodiscard]] at::Tensor geglu_backward(const at::Tensor& d_out, const at::Tensor& u);
void scatter_add_rows(const at::Tensor& grad, const at::Tensor& ids, const at::Tensor& d_rows, std::int64_t skip_id);
[[nodiscard]] CrossEntropy cross_entropy_(const at::Tensor& logits, const at::Tensor& labels, bool write_gradient);
void adamw_(const std::vector<AdamWPiece>& pieces);
[[nodiscard]] at::Tensor sum_of_squares(const at::Tensor& flat);

}  // namespace composed

}  // namespace cram::kernels
