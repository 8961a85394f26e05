// The operations of the encoder that are not matrix products. One declaration an operation; composed.cpp builds each
// from ATen operators, for every device and dtype: the oracle of any fused version.
//
// Legend: N rows (B*S tokens), H hidden, F rows of dense_in, M masked positions, V vocabulary.
#pragma once

#include <ATen/core/Tensor.h>

namespace cram::kernels {

struct NormOutput {
  at::Tensor y;     // [N,H] dtype of x
  at::Tensor mean;  // [N,1] fp32 (fp64 for fp64 input)
  at::Tensor rstd;  // [N,1]
};

/// LayerNorm over the last dimension; weight and bias [H] may be wider than x.
[[nodiscard]] NormOutput layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps);

/// Returns dx [N,H]; adds the weight and bias gradients to `weight_grad` and `bias_grad` [H].
[[nodiscard]] at::Tensor layer_norm_backward(const at::Tensor& dy, const at::Tensor& x, const NormOutput& saved,
                                             const at::Tensor& weight, const at::Tensor& bias,
                                             const at::Tensor& weight_grad, const at::Tensor& bias_grad);

/// u [N,F] = (value, gate) halves; returns gelu(gate) * value [N,F/2] with the exact (erf) GELU.
[[nodiscard]] at::Tensor geglu(const at::Tensor& u);
/// d_out [N,F/2] -> du [N,F].
[[nodiscard]] at::Tensor geglu_backward(const at::Tensor& d_out, const at::Tensor& u);

/// Adds the rows d_rows [N,H] to grad [V,H] at ids [N]; rows whose id is `skip_id`, which may be -1, are left out.
void scatter_add_rows(const at::Tensor& grad, const at::Tensor& ids, const at::Tensor& d_rows, std::int64_t skip_id);

struct CrossEntropy {
  at::Tensor loss_sum;  // [] fp64: sum over the M rows of logsumexp(logits) - logits[label]
  at::Tensor correct;   // [] int64: rows whose largest logit is the label's
};

/// Cross entropy of logits [M,V] against labels [M], summed. With `write_gradient` the logits are overwritten by the
/// gradient of the sum, softmax - onehot: computed from the same rounded logits as the loss, in fp32 (fp64) before it
/// is rounded to the logits' dtype. Without it they are kept, and `correct` is counted as well.
[[nodiscard]] CrossEntropy cross_entropy_(const at::Tensor& logits, const at::Tensor& labels, bool write_gradient);

}  // namespace cram::kernels
