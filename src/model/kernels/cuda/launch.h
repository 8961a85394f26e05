// Launchers of the CUDA kernels: plain pointers to device memory and a stream, no tensor library and no CUDA header, so
// that nvcc never sees the one and the rest of the program never the other. backend.cpp and products.cpp call them.
//
// All arithmetic is fp32; elements are bf16 or fp32. Nothing here allocates, synchronises or depends on timing: legal
// in a stream capture, and the same bits every time. Sizes may be 0. The caller checks cudaGetLastError().
#pragma once

#include <cstdint>
#include <vector>

#include "model/kernels/adamw.h"

struct CUstream_st;  // cudaStream_t is a pointer to it

namespace cram::kernels::cuda::launch {

using Stream = CUstream_st*;
enum class Element { kBf16, kFloat };

/// y = (x - mean) * rstd * weight + bias by rows of `width`. With `branch` (else nullptr) x is first x += branch, in
/// place and rounded. mean, rstd [rows].
void layer_norm(Element element, void* x, const void* branch, std::int64_t branch_rows, const float* weight,
                const float* bias, float eps, void* y, float* mean, float* rstd, std::int64_t rows, std::int64_t width,
                Stream stream);

/// Elements of `partial` that layer_norm_backward needs.
[[nodiscard]] std::int64_t layer_norm_partial_size(std::int64_t rows, std::int64_t width);
/// dx (+ residual, where not nullptr); weight_grad and bias_grad [width] += their sums, in two stages of fixed order.
void layer_norm_backward(Element element, const void* dy, const void* x, const float* mean, const float* rstd,
                         const float* weight, const void* residual, void* dx, float* partial, float* weight_grad,
                         float* bias_grad, std::int64_t rows, std::int64_t width, Stream stream);

/// out[r][c] = gelu(gate) * value of u[r] = (value, gate) halves of `half` elements; exact (erf) GELU.
void geglu(Element element, const void* u, void* out, std::int64_t rows, std::int64_t half, Stream stream);
void geglu_backward(Element element, const void* d_out, const void* u, void* du, std::int64_t rows, std::int64_t half,
                    Stream stream);

/// loss[r] = logsumexp(logits[r]) - logits[r][label[r]] of rows of `width`. With `write_gradient` the rows become
/// softmax - onehot; without it correct[r] is 1 where no logit is larger than the label's (the first of equal ones
/// wins).
void cross_entropy(Element element, void* logits, const std::int64_t* labels, double* loss, std::int64_t* correct,
                   bool write_gradient, std::int64_t rows, std::int64_t width, Stream stream);

/// Elements of `partial` that scatter_add_rows needs.
[[nodiscard]] std::int64_t scatter_partial_size(std::int64_t rows, std::int64_t width);
/// grad[ids[i]] += d_rows[order[i]] for i in [0, rows): ids ascending, rows of equal ids in the order of `order`. Ids
/// below 0 and `skip_id` are left out.
void scatter_add_rows(Element element, float* grad, const std::int32_t* ids, const std::int64_t* order,
                      const void* d_rows, float* partial, std::int64_t skip_id, std::int64_t rows, std::int64_t width,
                      Stream stream);

/// sum += x
void add_to(Element element, float* sum, const void* x, std::int64_t count, Stream stream);

/// One run of parameters; `working` receives the rounded master and may be nullptr.
struct FlatPiece {
  float *master, *grad, *exp_avg, *exp_avg_sq;
  void* working;
  Element working_element;
  std::int64_t count;
  AdamWCoefficients<float> coefficients;
};
/// The update of adamw.h on all pieces; the same bits as on the CPU.
void adamw(const std::vector<FlatPiece>& pieces, Stream stream);

/// Elements of `partial` that sum_of_squares needs.
[[nodiscard]] std::int64_t squares_partial_size(std::int64_t count);
/// *sum = sum of squares, in fp64 and in an order that `count` decides.
void sum_of_squares(const float* values, std::int64_t count, double* partial, double* sum, Stream stream);

}  // namespace cram::kernels::cuda::launch
