// Fused kernels of the encoder for bf16 on CPUs with AVX512-BF16: plain pointers, no tensor library, so that this code
// can be compiled with its own instruction set without leaking it into anything else. cpu*.cpp thread and call them.
//
// All arithmetic is fp32; bf16 is what is read and written (round to nearest even). Each row, head or chunk is computed
// alone and in a fixed order: the same bits for any number of threads.
#pragma once

#include <cstdint>

namespace cram::kernels::avx512 {

using bf16 = std::uint16_t;

/// True when this processor has what these kernels need.
[[nodiscard]] bool is_supported();

/// out[r][c] = gelu(gate) * value of u[r] = (value, gate) halves of `half` elements; exact (erf) GELU.
void geglu(const bf16* u, bf16* out, std::int64_t rows, std::int64_t half);
/// du from d_out and u.
void geglu_backward(const bf16* d_out, const bf16* u, bf16* du, std::int64_t rows, std::int64_t half);

/// y = (x - mean) * rstd * weight + bias by rows. With `branch`, x is first x += branch (in place, rounded): row r
/// takes its row (first_row + r) % branch_rows.
void layer_norm(bf16* x, const bf16* branch, std::int64_t branch_rows, std::int64_t first_row, const float* weight,
                const float* bias, float eps, bf16* y, float* mean, float* rstd, std::int64_t rows, std::int64_t width);
/// dx (+ residual, where given) and this chunk's sums of the weight and bias gradients, which are overwritten.
void layer_norm_backward(const bf16* dy, const bf16* x, const float* mean, const float* rstd, const float* weight,
                         const bf16* residual, bf16* dx, float* weight_grad, float* bias_grad, std::int64_t rows,
                         std::int64_t width);

/// One row of logits: returns logsumexp - logits[label]; with `write_gradient` the row becomes softmax - onehot.
[[nodiscard]] double cross_entropy_row(bf16* logits, std::int64_t width, std::int64_t label, bool write_gradient);
/// True when no logit is larger than the label's (the first of equal ones wins).
[[nodiscard]] bool is_largest(const bf16* logits, std::int64_t width, std::int64_t label);

/// Packs for matrix kernels, whose right operand is in pairs of neighbouring k: pair (k, k+1) of column c is the 32-bit
/// word out[k/2 * ld + c].
/// From the transpose, x [columns][k] with rows `stride` apart: k even; words up to the next multiple of 16 columns are
/// written.
void pack_transposed_pairs(const bf16* x, std::int64_t stride, std::int64_t columns, std::int64_t k, std::int64_t ld,
                           std::uint32_t* out);
/// From x [k][columns] itself: k even.
void pack_row_pairs(const bf16* x, std::int64_t stride, std::int64_t k, std::int64_t columns, std::int64_t ld,
                    std::uint32_t* out);
/// out [columns][ld] = the transpose of x [rows][columns]; up to the next multiple of 16 rows are written.
void transpose(const bf16* x, std::int64_t stride, std::int64_t rows, std::int64_t columns, bf16* out, std::int64_t ld);
/// out [rows][columns] = c, rounded; rows ldc and ld apart.
void round_rows(const float* c, std::int64_t ldc, std::int64_t rows, std::int64_t columns, bf16* out, std::int64_t ld);

/// grad += x
void add_to(float* grad, const bf16* x, std::int64_t count);

/// Sizes that `add_transposed_product` can do: an even number of tokens, `in` a multiple of 16, `out` of 2.
[[nodiscard]] bool transposed_product_fits(std::int64_t tokens, std::int64_t out, std::int64_t in);
/// x [tokens][in] is packed first, in `transposed_product_pieces` independent pieces, to `x_pairs` [tokens/2 * in]
/// words.
[[nodiscard]] std::int64_t transposed_product_pieces(std::int64_t tokens, std::int64_t in);
void pack_piece(const bf16* x, std::int64_t tokens, std::int64_t in, std::int64_t piece, std::uint32_t* x_pairs);
/// Bytes of scratch memory for one call.
[[nodiscard]] std::int64_t transposed_product_scratch_bytes();
/// grad[m][n] += sum over t of dy[t][m] x[t][n] for m in [first, last), n in [0, in): the weight gradient of y = x W',
/// summed in fp32 and added to the fp32 gradient without a rounded product between. dy is [tokens][out], grad
/// [out][in]; first and last are even.
void add_transposed_product(const bf16* dy, const std::uint32_t* x_pairs, float* grad, std::int64_t tokens,
                            std::int64_t out, std::int64_t in, std::int64_t first, std::int64_t last, void* scratch);

/// Rows of attention scores [rows][columns], which are overwritten: p = softmax(scale * scores), rounded, and the
/// log-sum-exp of each scaled row.
void softmax(float* scores, std::int64_t ld, std::int64_t rows, std::int64_t columns, float scale, bf16* p,
             std::int64_t ldp, float* log_sum);
/// p again from the scores and their log_sum, and ds = scale * p * (dp - sum(p dp)) from dp; all rounded. Both inputs
/// are overwritten.
void softmax_backward(float* scores, float* dp, std::int64_t ld, std::int64_t rows, std::int64_t columns, float scale,
                      const float* log_sum, bf16* p, bf16* ds, std::int64_t ldp);

}  // namespace cram::kernels::avx512
