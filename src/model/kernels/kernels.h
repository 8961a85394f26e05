// The operations of the encoder and its optimizer: one declaration an operation, several backends (backend.h) behind
// it. On bf16 CPU tensors of a processor with AVX512-BF16, and on bf16 and fp32 tensors of a GPU, they are fused
// kernels; everywhere else, and as the oracle of those, the compositions of ATen operators in namespace `composed`, for
// every device and dtype. The choice depends on device, dtype, sizes and instruction set alone.
//
// Legend: N rows (B*S tokens), H hidden, F rows of dense_in, M masked positions, V vocabulary.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "model/kernels/adamw.h"

namespace cram::kernels {

class WeightPanels;  // panels.h: what products keep of a weight

struct NormOutput {
  at::Tensor y;     // [N,H] dtype of x
  at::Tensor mean;  // [N,1] fp32 (fp64 for fp64 input)
  at::Tensor rstd;  // [N,1]
};

/// LayerNorm over the last dimension; weight and bias [H] may be wider than x.
[[nodiscard]] NormOutput layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps);

/// x += branch in place, then layer_norm of the sum. branch [N,H], or [R,H] where N is a multiple of R: its rows are
/// then used over and over (positions of a batch).
[[nodiscard]] NormOutput add_layer_norm_(const at::Tensor& x, const at::Tensor& branch, const at::Tensor& weight,
                                         const at::Tensor& bias, double eps);

/// Returns dx [N,H], plus `residual` [N,H] where defined (the gradient that passes beside the norm); adds the weight
/// and bias gradients to `weight_grad` and `bias_grad` [H].
[[nodiscard]] at::Tensor layer_norm_backward(const at::Tensor& dy, const at::Tensor& x, const NormOutput& saved,
                                             const at::Tensor& weight, const at::Tensor& bias,
                                             const at::Tensor& weight_grad, const at::Tensor& bias_grad,
                                             const at::Tensor& residual = at::Tensor());

/// What attention keeps for its backward pass. The fused kernels keep their input and a number a row (a GPU's also the
/// result); the composed one the split heads, and the probabilities unless they are to be made again.
struct AttentionSaved {
  at::Tensor qkv;            // [N,3*heads*d]
  at::Tensor log_sum;        // [B*heads,S] fp32; on a GPU [B,heads,S]
  at::Tensor context;        // [B,heads,S,d], of a GPU
  at::Tensor rng_state[2];   // of a GPU: what dropout would need, which there is none of
  at::Tensor split;          // [3,B*heads,S,d]
  at::Tensor probabilities;  // [B*heads,S,S]
  // Of picked rows alone:
  at::Tensor picks;                    // [M] int64, b*S+s
  at::Tensor pick_order, pick_begins;  // [M], [B+1] int64: their numbers by b, and where each b begins; a CPU's
};

/// What attention is asked for beside its input.
struct AttentionSettings {
  std::int64_t batch = 1;          ///< B rows of S tokens
  std::int64_t heads = 1;          ///< of this rank
  std::int64_t head_dim = 0;       ///< d
  bool keep_probabilities = true;  ///< composed: false makes them again in the backward pass, from the same inputs
  /// [B] int64 on the tensors' device, 1 to S: tokens of a row; the rest is padding, which nothing attends to.
  /// Undefined: every row is full. Padding attends to the row's tokens, so that its own (unused) result is finite.
  at::Tensor lengths = {};
};

/// Self-attention: qkv [N,3*heads*d] grouped per head (q, k, v) -> context [N,heads*d], or [M,heads*d] of the distinct
/// rows `picks` [M] alone (all tokens of their row are attended to); backward takes the same shape. `saved` may be
/// null.
[[nodiscard]] at::Tensor attention(const at::Tensor& qkv, const AttentionSettings& settings, AttentionSaved* saved,
                                   const at::Tensor& picks = at::Tensor());
/// d_context [N,heads*d] -> d_qkv [N,3*heads*d]; zero for keys and values of padding.
[[nodiscard]] at::Tensor attention_backward(const at::Tensor& d_context, const AttentionSettings& settings,
                                            const AttentionSaved& saved);

/// y [N,out] = x W^T: x [N,in], weight [out,in].
[[nodiscard]] at::Tensor product_transposed(const at::Tensor& x, const at::Tensor& weight, WeightPanels& panels);
/// dx [N,in] = dy W: dy [N,out], weight [out,in].
[[nodiscard]] at::Tensor product(const at::Tensor& dy, const at::Tensor& weight, WeightPanels& panels);
/// [rows,H] that is zero but for `picked` [M,H] at the distinct rows `picks` [M]: the transpose of picking rows.
[[nodiscard]] at::Tensor put_rows(const at::Tensor& picked, const at::Tensor& picks, std::int64_t rows);

/// sum += dy^T x: dy [N,out], x [N,in], sum [out,in], the weight gradient of y = x W^T. In fp32 for bf16 operands.
void add_transposed_product_(const at::Tensor& sum, const at::Tensor& dy, const at::Tensor& x);

/// sum += x, where the sum may be wider than x.
void add_to_(const at::Tensor& sum, const at::Tensor& x);

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

/// A part of the flat buffers that an update changes: fp32 (fp64) tensors of one size, contiguous.
struct AdamWPiece {
  at::Tensor master, grad, exp_avg, exp_avg_sq;
  at::Tensor working;  ///< receives the new master in its own format; undefined where the master itself is used
  AdamWStep step;
};

/// Updates all pieces (Loshchilov & Hutter 2019, decoupled weight decay) and clears their gradients.
void adamw_(const std::vector<AdamWPiece>& pieces);

/// [] fp64 on the tensor's device: sum of the squares of a contiguous fp32 (fp64) tensor, in an order that its size
/// alone decides.
[[nodiscard]] at::Tensor sum_of_squares(const at::Tensor& flat);

/// "composed", "cpu" or "cuda": which backend works on activations like this one.
[[nodiscard]] const char* backend_name(const at::Tensor& x);

/// What of the encoder is fused in this build, on this machine: what is composed keeps and needs more memory.
struct Fusion {
  bool rows = false;       ///< norms, GELU and the loss
  bool attention = false;  ///< of rows of `seq` tokens with heads of `head_dim`
};
[[nodiscard]] Fusion fusion_of(at::DeviceType device, at::ScalarType type, std::int64_t seq, std::int64_t head_dim);

}  // namespace cram::kernels
