#include "model/kernels/cpu_attention.h"

#include <ATen/native/CPUBlas.h>

#include <algorithm>
#include <cmath>

namespace cram::kernels {
namespace {

using avx512::bf16;

constexpr std::int64_t kRows = 64;  // of the scores at a time: they stay in the first-level cache

std::int64_t padded(std::int64_t count) { return (count + 15) / 16 * 16; }

// c [rows][ldc] = a [rows][lda] b, b as pairs [depth/2][ldb].
void multiply(std::int64_t rows, std::int64_t columns, std::int64_t depth, const bf16* a, std::int64_t lda,
              const std::uint32_t* b, std::int64_t ldb, float* c, std::int64_t ldc) {
  at::native::cpublas::brgemm(rows, columns, depth, lda, ldb, ldc, /*add_C=*/false,
                              reinterpret_cast<const at::BFloat16*>(a), reinterpret_cast<const at::BFloat16*>(b), c);
}

// Scratch of one head, cut from one block. Rows are padded to whole vectors.
struct Scratch {
  std::int64_t s, d, lds, ldd;
  std::uint32_t *k_transposed, *v_transposed;        // [d/2][lds]
  std::uint32_t *k_pairs, *q_pairs, *v_or_do_pairs;  // [S/2][ldd]
  float *scores, *d_scores;                          // [kRows][lds]
  float* product;                                    // [S][ldd]
  bf16 *p, *ds, *p_transposed, *ds_transposed;       // [S][lds]
  std::int64_t bytes = 0;

  Scratch(const HeadShape& shape, void* memory)
      : s(shape.seq), d(shape.head_dim), lds(padded(shape.seq)), ldd(padded(shape.head_dim)) {
    auto* begin = static_cast<std::uint8_t*>(memory);
    const auto take = [&](auto*& piece, std::int64_t count) {
      using Element = std::remove_reference_t<decltype(*piece)>;
      piece = reinterpret_cast<Element*>(begin + bytes);
      bytes += (count * static_cast<std::int64_t>(sizeof(Element)) + 63) / 64 * 64;
    };
    for (std::uint32_t** matrix : {&k_transposed, &v_transposed}) take(*matrix, d / 2 * lds);
    for (std::uint32_t** matrix : {&k_pairs, &q_pairs, &v_or_do_pairs}) take(*matrix, s / 2 * ldd);
    for (float** rows : {&scores, &d_scores}) take(*rows, kRows * lds);
    take(product, s * ldd);
    for (bf16** matrix : {&p, &ds, &p_transposed, &ds_transposed}) take(*matrix, padded(s) * lds);
  }

  // out [S][d], rounded, rows `ld` apart = a [S][lds] times pairs.
  void multiply_all(const bf16* a, const std::uint32_t* pairs, bf16* out, std::int64_t ld) const {
    multiply(s, d, s, a, lds, pairs, ldd, product, ldd);
    avx512::round_rows(product, ldd, s, d, out, ld);
  }
};

float scale_of(const HeadShape& shape) { return 1.0F / std::sqrt(static_cast<float>(shape.head_dim)); }

}  // namespace

std::int64_t HeadShape::scratch_bytes() const { return Scratch(*this, nullptr).bytes; }

void attend_head(const HeadShape& shape, const bf16* qkv, bf16* context, float* log_sum, void* memory) {
  const Scratch t(shape, memory);
  avx512::pack_transposed_pairs(qkv + t.d, shape.stride, t.s, t.d, t.lds, t.k_transposed);
  avx512::pack_row_pairs(qkv + 2 * t.d, shape.stride, t.s, t.d, t.ldd, t.v_or_do_pairs);
  for (std::int64_t row = 0; row < t.s; row += kRows) {
    const std::int64_t rows = std::min(kRows, t.s - row);
    multiply(rows, t.s, t.d, qkv + row * shape.stride, shape.stride, t.k_transposed, t.lds, t.scores, t.lds);
    avx512::softmax(t.scores, t.lds, rows, t.s, scale_of(shape), t.p + row * t.lds, t.lds, log_sum + row);
  }
  t.multiply_all(t.p, t.v_or_do_pairs, context, shape.context_stride);
}

void attend_head_backward(const HeadShape& shape, const bf16* qkv, const bf16* d_context, const float* log_sum,
                          bf16* d_qkv, void* memory) {
  const Scratch t(shape, memory);
  const bf16 *k = qkv + t.d, *v = qkv + 2 * t.d;
  avx512::pack_transposed_pairs(k, shape.stride, t.s, t.d, t.lds, t.k_transposed);
  avx512::pack_transposed_pairs(v, shape.stride, t.s, t.d, t.lds, t.v_transposed);
  avx512::pack_row_pairs(k, shape.stride, t.s, t.d, t.ldd, t.k_pairs);
  avx512::pack_row_pairs(qkv, shape.stride, t.s, t.d, t.ldd, t.q_pairs);
  avx512::pack_row_pairs(d_context, shape.context_stride, t.s, t.d, t.ldd, t.v_or_do_pairs);
  for (std::int64_t row = 0; row < t.s; row += kRows) {
    const std::int64_t rows = std::min(kRows, t.s - row);
    multiply(rows, t.s, t.d, qkv + row * shape.stride, shape.stride, t.k_transposed, t.lds, t.scores, t.lds);
    multiply(rows, t.s, t.d, d_context + row * shape.context_stride, shape.context_stride, t.v_transposed, t.lds,
             t.d_scores, t.lds);
    avx512::softmax_backward(t.scores, t.d_scores, t.lds, rows, t.s, scale_of(shape), log_sum + row, t.p + row * t.lds,
                             t.ds + row * t.lds, t.lds);
  }
  avx512::transpose(t.p, t.lds, t.s, t.s, t.p_transposed, t.lds);
  avx512::transpose(t.ds, t.lds, t.s, t.s, t.ds_transposed, t.lds);
  t.multiply_all(t.ds, t.k_pairs, d_qkv, shape.stride);                            // dQ = dS K
  t.multiply_all(t.ds_transposed, t.q_pairs, d_qkv + t.d, shape.stride);           // dK = dS' Q
  t.multiply_all(t.p_transposed, t.v_or_do_pairs, d_qkv + 2 * t.d, shape.stride);  // dV = P' dO
}

void release_attention() { at::native::cpublas::brgemm_release(); }

}  // namespace cram::kernels
