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
  bf16 *q_rows, *do_rows;                            // [S][ldd], picked
  float* log_rows;                                   // [S]
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
    for (bf16** matrix : {&q_rows, &do_rows}) take(*matrix, s * ldd);
    take(log_rows, s);
  }

  // out [rows][d], rounded, rows `ld` apart = a [rows][lds] times `depth` rows as pairs.
  void multiply_all(std::int64_t rows, std::int64_t depth, const bf16* a, const std::uint32_t* pairs, bf16* out,
                    std::int64_t ld) const {
    multiply(rows, d, depth, a, lds, pairs, ldd, product, ldd);
    avx512::round_rows(product, ldd, rows, d, out, ld);
  }
};

// Probabilities [rows][lds] of keys that are padding.
void clear_padding(const HeadShape& shape, std::int64_t lds, bf16* p, std::int64_t rows) {
  if (shape.keys == shape.seq) return;
  for (std::int64_t r = 0; r < rows; ++r) std::fill_n(p + r * lds + shape.keys, shape.seq - shape.keys, bf16{0});
}

float scale_of(const HeadShape& shape) { return 1.0F / std::sqrt(static_cast<float>(shape.head_dim)); }

// Some rows of a head, `stride` elements apart.
struct Rows {
  const bf16* first;
  std::int64_t count, stride;

  [[nodiscard]] const bf16* at(std::int64_t row) const { return first + row * stride; }
};

// P of these queries, and log_sum of their rows.
void attend(const HeadShape& shape, const Scratch& t, const Rows& q, const bf16* k, const bf16* v, float* log_sum) {
  avx512::pack_transposed_pairs(k, shape.stride, t.s, t.d, t.lds, t.k_transposed);
  avx512::pack_row_pairs(v, shape.stride, t.s, t.d, t.ldd, t.v_or_do_pairs);
  for (std::int64_t row = 0; row < q.count; row += kRows) {
    const std::int64_t rows = std::min(kRows, q.count - row);
    multiply(rows, t.s, t.d, q.at(row), q.stride, t.k_transposed, t.lds, t.scores, t.lds);
    avx512::softmax(t.scores, t.lds, rows, shape.keys, scale_of(shape), t.p + row * t.lds, t.lds, log_sum + row);
    clear_padding(shape, t.lds, t.p + row * t.lds, rows);
  }
}

// P and dS of these queries, and both transposed; the operands of the products that follow, as pairs. `even`: rows of q
// and d_out to sum over, one more than theirs where their number is odd; that one is zero.
void attend_backward(const HeadShape& shape, const Scratch& t, const Rows& q, const Rows& d_out, std::int64_t even,
                     const bf16* k, const bf16* v, const float* log_sum) {
  avx512::pack_transposed_pairs(k, shape.stride, t.s, t.d, t.lds, t.k_transposed);
  avx512::pack_transposed_pairs(v, shape.stride, t.s, t.d, t.lds, t.v_transposed);
  avx512::pack_row_pairs(k, shape.stride, t.s, t.d, t.ldd, t.k_pairs);
  avx512::pack_row_pairs(q.first, q.stride, even, t.d, t.ldd, t.q_pairs);
  avx512::pack_row_pairs(d_out.first, d_out.stride, even, t.d, t.ldd, t.v_or_do_pairs);
  for (std::int64_t row = 0; row < q.count; row += kRows) {
    const std::int64_t rows = std::min(kRows, q.count - row);
    multiply(rows, t.s, t.d, q.at(row), q.stride, t.k_transposed, t.lds, t.scores, t.lds);
    multiply(rows, t.s, t.d, d_out.at(row), d_out.stride, t.v_transposed, t.lds, t.d_scores, t.lds);
    avx512::softmax_backward(t.scores, t.d_scores, t.lds, rows, shape.keys, scale_of(shape), log_sum + row,
                             t.p + row * t.lds, t.ds + row * t.lds, t.lds);
    for (bf16* matrix : {t.p, t.ds}) clear_padding(shape, t.lds, matrix + row * t.lds, rows);
  }
  if (even > q.count) {
    for (bf16* rows : {t.p, t.ds}) std::fill_n(rows + q.count * t.lds, t.s, bf16{0});
  }
  avx512::transpose(t.p, t.lds, even, t.s, t.p_transposed, t.lds);
  avx512::transpose(t.ds, t.lds, even, t.s, t.ds_transposed, t.lds);
}

}  // namespace

std::int64_t HeadShape::scratch_bytes() const { return Scratch(*this, nullptr).bytes; }

void attend_head(const HeadShape& shape, const bf16* qkv, bf16* context, float* log_sum, void* memory) {
  const Scratch t(shape, memory);
  attend(shape, t, {qkv, t.s, shape.stride}, qkv + t.d, qkv + 2 * t.d, log_sum);
  t.multiply_all(t.s, t.s, t.p, t.v_or_do_pairs, context, shape.context_stride);
}

void attend_head_backward(const HeadShape& shape, const bf16* qkv, const bf16* d_context, const float* log_sum,
                          bf16* d_qkv, void* memory) {
  const Scratch t(shape, memory);
  attend_backward(shape, t, {qkv, t.s, shape.stride}, {d_context, t.s, shape.context_stride}, t.s, qkv + t.d,
                  qkv + 2 * t.d, log_sum);
  t.multiply_all(t.s, t.s, t.ds, t.k_pairs, d_qkv, shape.stride);                            // dQ = dS K
  t.multiply_all(t.s, t.s, t.ds_transposed, t.q_pairs, d_qkv + t.d, shape.stride);           // dK = dS' Q
  t.multiply_all(t.s, t.s, t.p_transposed, t.v_or_do_pairs, d_qkv + 2 * t.d, shape.stride);  // dV = P' dO
}

void attend_picked(const HeadShape& shape, const HeadPicks& picks, const bf16* qkv, bf16* context, float* log_sum,
                   void* memory) {
  if (picks.count == 0) return;
  const Scratch t(shape, memory);
  for (std::int64_t i = 0; i < picks.count; ++i) {
    std::copy_n(qkv + picks.position(i) * shape.stride, t.d, t.q_rows + i * t.ldd);
  }
  attend(shape, t, {t.q_rows, picks.count, t.ldd}, qkv + t.d, qkv + 2 * t.d, t.log_rows);
  multiply(picks.count, t.d, t.s, t.p, t.lds, t.v_or_do_pairs, t.ldd, t.product, t.ldd);
  for (std::int64_t i = 0; i < picks.count; ++i) {
    log_sum[picks.position(i)] = t.log_rows[i];
    avx512::round_rows(t.product + i * t.ldd, t.ldd, 1, t.d, context + picks.row(i) * shape.context_stride, t.d);
  }
}

void attend_picked_backward(const HeadShape& shape, const HeadPicks& picks, const bf16* qkv, const bf16* d_context,
                            const float* log_sum, bf16* d_qkv, void* memory) {
  const Scratch t(shape, memory);
  // Queries that were not picked have no gradient; without any, neither have keys and values.
  const std::int64_t empty = picks.count == 0 ? 3 * t.d : t.d;
  for (std::int64_t r = 0; r < t.s; ++r) std::fill_n(d_qkv + r * shape.stride, empty, bf16{0});
  if (picks.count == 0) return;
  for (std::int64_t i = 0; i < picks.count; ++i) {
    std::copy_n(qkv + picks.position(i) * shape.stride, t.d, t.q_rows + i * t.ldd);
    std::copy_n(d_context + picks.row(i) * shape.context_stride, t.d, t.do_rows + i * t.ldd);
    t.log_rows[i] = log_sum[picks.position(i)];
  }
  // Sums over queries go by pairs: an odd one is joined by a row of zeros.
  const std::int64_t even = picks.count + picks.count % 2;
  if (even > picks.count) {
    for (bf16* rows : {t.q_rows, t.do_rows}) std::fill_n(rows + picks.count * t.ldd, t.d, bf16{0});
  }
  attend_backward(shape, t, {t.q_rows, picks.count, t.ldd}, {t.do_rows, picks.count, t.ldd}, even, qkv + t.d,
                  qkv + 2 * t.d, t.log_rows);
  multiply(picks.count, t.d, t.s, t.ds, t.lds, t.k_pairs, t.ldd, t.product, t.ldd);  // dQ = dS K
  for (std::int64_t i = 0; i < picks.count; ++i) {
    avx512::round_rows(t.product + i * t.ldd, t.ldd, 1, t.d, d_qkv + picks.position(i) * shape.stride, t.d);
  }
  t.multiply_all(t.s, even, t.ds_transposed, t.q_pairs, d_qkv + t.d, shape.stride);           // dK = dS' Q
  t.multiply_all(t.s, even, t.p_transposed, t.v_or_do_pairs, d_qkv + 2 * t.d, shape.stride);  // dV = P' dO
}

void release_attention() { at::native::cpublas::brgemm_release(); }

}  // namespace cram::kernels
