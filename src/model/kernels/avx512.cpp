#include "model/kernels/avx512.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>

namespace cram::kernels::avx512 {
namespace {

constexpr std::int64_t kLanes = 16;

// All lanes, or the first ones of a row's end. Most of a row is whole vectors, which need no masks.
struct Full {};
struct Tail {
  __mmask16 mask;
};

// Calls body(first element, Full or Tail) for `count` elements.
template <class Body>
inline __attribute__((always_inline)) void for_lanes(std::int64_t count, const Body& body) {
  std::int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes) body(c, Full{});
  if (c < count) body(c, Tail{static_cast<__mmask16>((1U << (count - c)) - 1)});
}

__m512 widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
__m256i narrow(__m512 x) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)); }

__m512 load(const bf16* p, Full) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
__m512 load(const bf16* p, Tail t) { return widen(_mm256_maskz_loadu_epi16(t.mask, p)); }
__m512 load(const float* p, Full) { return _mm512_loadu_ps(p); }
__m512 load(const float* p, Tail t) { return _mm512_maskz_loadu_ps(t.mask, p); }
void store(bf16* p, Full, __m512 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x)); }
void store(bf16* p, Tail t, __m512 x) { _mm256_mask_storeu_epi16(p, t.mask, narrow(x)); }
void store(float* p, Full, __m512 x) { _mm512_storeu_ps(p, x); }
void store(float* p, Tail t, __m512 x) { _mm512_mask_storeu_ps(p, t.mask, x); }
// What lies beyond the end of a row becomes `otherwise`.
__m512 keep(__m512 x, Full, __m512) { return x; }
__m512 keep(__m512 x, Tail t, __m512 otherwise) { return _mm512_mask_mov_ps(otherwise, t.mask, x); }
__m512 keep(__m512 x, Full) { return x; }
__m512 keep(__m512 x, Tail t) { return _mm512_maskz_mov_ps(t.mask, x); }
__mmask16 mask_of(Full) { return static_cast<__mmask16>(0xFFFF); }
__mmask16 mask_of(Tail t) { return t.mask; }

// e^x by 2^n * e^r, |r| <= ln2/2, polynomial of Cephes' expf (Moshier 1989): 2 units in the last place.
__m512 exp512(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-87.0F));
  x = _mm512_min_ps(x, _mm512_set1_ps(88.0F));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504F)), _MM_FROUND_TO_NEAREST_INT);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375F), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4F), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4F);
  for (const float c : {1.3981999507e-3F, 8.3334519073e-3F, 4.1665795894e-2F, 1.6666665459e-1F, 5.0000001201e-1F}) {
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  }
  const __m512 e = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0F));
  return _mm512_scalef_ps(e, n);
}

// erf as an odd rational function where it is not +-1 in fp32 yet. Coefficients are a minimax fit widely used for fp32
// erf; the test compares every bf16 input with std::erf.
__m512 erf512(__m512 x) {
  const __m512 end = _mm512_set1_ps(3.832506856900711F);
  const __m512 one = _mm512_set1_ps(1.0F);
  const __mmask16 above = _mm512_cmp_ps_mask(x, end, _CMP_GT_OQ);
  const __mmask16 below = _mm512_cmp_ps_mask(x, _mm512_sub_ps(_mm512_setzero_ps(), end), _CMP_LT_OQ);
  const __m512 s = _mm512_mul_ps(x, x);
  __m512 p = _mm512_set1_ps(-2.72614225801306e-10F);
  for (const float c : {2.77068142495902e-08F, -2.10102402082508e-06F, -5.69250639462346e-05F, -7.34990630326855e-04F,
                        -2.95459980854025e-03F, -1.60960333262415e-02F}) {
    p = _mm512_fmadd_ps(p, s, _mm512_set1_ps(c));
  }
  __m512 q = _mm512_set1_ps(-1.45660718464996e-05F);
  for (const float c :
       {-2.13374055278905e-04F, -1.68282697438203e-03F, -7.37332916720468e-03F, -1.42647390514189e-02F}) {
    q = _mm512_fmadd_ps(q, s, _mm512_set1_ps(c));
  }
  const __m512 inside = _mm512_div_ps(_mm512_mul_ps(x, p), q);
  return _mm512_mask_mov_ps(_mm512_mask_mov_ps(inside, above, one), below, _mm512_sub_ps(_mm512_setzero_ps(), one));
}

// Distribution function of the normal distribution.
__m512 normal_cdf(__m512 x) {
  const __m512 half = _mm512_set1_ps(0.5F);
  return _mm512_fmadd_ps(half, erf512(_mm512_mul_ps(x, _mm512_set1_ps(0.70710678F))), half);
}

// Transposes a 16 x 16 matrix of 32-bit words.
inline __attribute__((always_inline)) void transpose_words(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int j = 0; j < 4; ++j) {
    t[j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
    t[4 + j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
    t[8 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
    t[12 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
  }
  for (int j = 0; j < 4; ++j) {
    r[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
    r[4 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0x88);
    r[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd);
    r[12 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0xdd);
  }
}

// Sixteen rows of up to 32 elements of x, transposed as 32-bit words; rows beyond the last are 0.
inline __attribute__((always_inline)) void load_transposed(const bf16* x, std::int64_t stride, std::int64_t rows,
                                                           std::int64_t columns, __m512i (&words)[16]) {
  const auto mask = static_cast<__mmask32>(columns >= 32 ? 0xFFFFFFFFU : (1U << columns) - 1);
  for (int i = 0; i < 16; ++i) {
    words[i] = i < rows ? _mm512_maskz_loadu_epi16(mask, x + i * stride) : _mm512_setzero_si512();
  }
  transpose_words(words);
}

}  // namespace

bool is_supported() {
  return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
         __builtin_cpu_supports("avx512vl") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
         __builtin_cpu_supports("avx512bf16") != 0;
}

void geglu(const bf16* u, bf16* out, std::int64_t rows, std::int64_t half) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const bf16* value = u + r * 2 * half;
    const bf16* gate = value + half;
    bf16* row = out + r * half;
    for_lanes(half, [&](std::int64_t c, auto lanes) {
      const __m512 g = load(gate + c, lanes);
      store(row + c, lanes, _mm512_mul_ps(_mm512_mul_ps(g, normal_cdf(g)), load(value + c, lanes)));
    });
  }
}

void geglu_backward(const bf16* d_out, const bf16* u, bf16* du, std::int64_t rows, std::int64_t half) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const bf16* value = u + r * 2 * half;
    const bf16* gate = value + half;
    const bf16* d_row = d_out + r * half;
    bf16* d_value = du + r * 2 * half;
    for_lanes(half, [&](std::int64_t c, auto lanes) {
      const __m512 g = load(gate + c, lanes), v = load(value + c, lanes), d = load(d_row + c, lanes);
      const __m512 cdf = normal_cdf(g);
      // gelu'(g) = cdf(g) + g * pdf(g)
      const __m512 square = _mm512_mul_ps(g, g);
      const __m512 density =
          _mm512_mul_ps(exp512(_mm512_mul_ps(square, _mm512_set1_ps(-0.5F))), _mm512_set1_ps(0.39894228F));
      store(d_value + c, lanes, _mm512_mul_ps(d, _mm512_mul_ps(g, cdf)));
      store(d_value + half + c, lanes, _mm512_mul_ps(_mm512_mul_ps(d, v), _mm512_fmadd_ps(g, density, cdf)));
    });
  }
}

void layer_norm(bf16* x, const bf16* branch, std::int64_t branch_rows, std::int64_t first_row, const float* weight,
                const float* bias, float eps, bf16* y, float* mean, float* rstd, std::int64_t rows,
                std::int64_t width) {
  const float inverse = 1.0F / static_cast<float>(width);
  for (std::int64_t r = 0; r < rows; ++r) {
    bf16* row = x + r * width;
    bf16* y_row = y + r * width;
    __m512 sum = _mm512_setzero_ps();
    if (branch != nullptr) {
      const bf16* more = branch + (first_row + r) % branch_rows * width;
      for_lanes(width, [&](std::int64_t c, auto lanes) {
        store(row + c, lanes, _mm512_add_ps(load(row + c, lanes), load(more + c, lanes)));
      });
    }
    for_lanes(width, [&](std::int64_t c, auto lanes) { sum = _mm512_add_ps(sum, load(row + c, lanes)); });
    const float m = _mm512_reduce_add_ps(sum) * inverse;
    const __m512 mv = _mm512_set1_ps(m);
    __m512 squares = _mm512_setzero_ps();
    for_lanes(width, [&](std::int64_t c, auto lanes) {
      const __m512 centred = keep(_mm512_sub_ps(load(row + c, lanes), mv), lanes);
      squares = _mm512_fmadd_ps(centred, centred, squares);
    });
    const float s = 1.0F / std::sqrt(_mm512_reduce_add_ps(squares) * inverse + eps);
    const __m512 sv = _mm512_set1_ps(s);
    for_lanes(width, [&](std::int64_t c, auto lanes) {
      const __m512 xhat = _mm512_mul_ps(_mm512_sub_ps(load(row + c, lanes), mv), sv);
      store(y_row + c, lanes, _mm512_fmadd_ps(xhat, load(weight + c, lanes), load(bias + c, lanes)));
    });
    mean[r] = m;
    rstd[r] = s;
  }
}

void layer_norm_backward(const bf16* dy, const bf16* x, const float* mean, const float* rstd, const float* weight,
                         const bf16* residual, bf16* dx, float* weight_grad, float* bias_grad, std::int64_t rows,
                         std::int64_t width) {
  const float inverse = 1.0F / static_cast<float>(width);
  std::fill_n(weight_grad, width, 0.0F);
  std::fill_n(bias_grad, width, 0.0F);
  for (std::int64_t r = 0; r < rows; ++r) {
    const bf16* dy_row = dy + r * width;
    const bf16* x_row = x + r * width;
    bf16* dx_row = dx + r * width;
    const __m512 mv = _mm512_set1_ps(mean[r]), sv = _mm512_set1_ps(rstd[r]);
    __m512 sum = _mm512_setzero_ps(), dot = _mm512_setzero_ps();
    for_lanes(width, [&](std::int64_t c, auto lanes) {
      const __m512 d = load(dy_row + c, lanes);
      const __m512 xhat = keep(_mm512_mul_ps(_mm512_sub_ps(load(x_row + c, lanes), mv), sv), lanes);
      const __m512 scaled = _mm512_mul_ps(d, load(weight + c, lanes));
      sum = _mm512_add_ps(sum, scaled);
      dot = _mm512_fmadd_ps(scaled, xhat, dot);
      store(weight_grad + c, lanes, _mm512_fmadd_ps(d, xhat, load(weight_grad + c, lanes)));
      store(bias_grad + c, lanes, _mm512_add_ps(d, load(bias_grad + c, lanes)));
    });
    // dx = rstd * (w dy - mean(w dy) - xhat * mean(w dy xhat))
    const __m512 mean_d = _mm512_set1_ps(_mm512_reduce_add_ps(sum) * inverse);
    const __m512 mean_dx = _mm512_set1_ps(_mm512_reduce_add_ps(dot) * inverse);
    const bf16* beside = residual == nullptr ? nullptr : residual + r * width;
    for_lanes(width, [&](std::int64_t c, auto lanes) {
      const __m512 xhat = _mm512_mul_ps(_mm512_sub_ps(load(x_row + c, lanes), mv), sv);
      const __m512 scaled = _mm512_mul_ps(load(dy_row + c, lanes), load(weight + c, lanes));
      __m512 d = _mm512_mul_ps(sv, _mm512_fnmadd_ps(xhat, mean_dx, _mm512_sub_ps(scaled, mean_d)));
      if (beside != nullptr) d = _mm512_add_ps(d, load(beside + c, lanes));
      store(dx_row + c, lanes, d);
    });
  }
}

double cross_entropy_row(bf16* logits, std::int64_t width, std::int64_t label, bool write_gradient) {
  const __m512 lowest = _mm512_set1_ps(-3.0e38F);
  __m512 largest = lowest;
  for_lanes(width, [&](std::int64_t c, auto lanes) {
    largest = _mm512_max_ps(largest, keep(load(logits + c, lanes), lanes, lowest));
  });
  const float top = _mm512_reduce_max_ps(largest);
  const __m512 topv = _mm512_set1_ps(top);
  const Tail first{1};
  // The label's term stays apart: at a low loss it is nearly all of the sum, and what is left of it counts. It is put
  // to one side as the smallest number while the others are summed.
  const float own = _mm512_cvtss_f32(load(logits + label, first));
  const bf16 kept = logits[label];
  logits[label] = 0xFF7F;  // -3.39e38
  __m512 sum = _mm512_setzero_ps();
  for_lanes(width, [&](std::int64_t c, auto lanes) {
    const __m512 x = _mm512_sub_ps(load(logits + c, lanes), topv);
    // exp512 ends at e^-87; what is below is nothing.
    const __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0F), _CMP_GE_OQ) & mask_of(lanes);
    sum = _mm512_mask_add_ps(sum, counts, sum, exp512(x));
  });
  logits[label] = kept;
  const float others = _mm512_reduce_add_ps(sum);
  const float own_term = std::exp(own - top);
  const float total = others + own_term;
  const float log_total = std::log(total);
  const double loss = own == top ? std::log1p(static_cast<double>(others))
                                 : static_cast<double>(top) - static_cast<double>(own) + static_cast<double>(log_total);
  if (!write_gradient) return loss;
  const __m512 shift = _mm512_set1_ps(top + log_total);
  for_lanes(width, [&](std::int64_t c, auto lanes) {
    store(logits + c, lanes, exp512(_mm512_sub_ps(load(logits + c, lanes), shift)));
  });
  store(logits + label, first, _mm512_set1_ps(-others / total));  // p - 1
  return loss;
}

bool is_largest(const bf16* logits, std::int64_t width, std::int64_t label) {
  const __m512 own = _mm512_set1_ps(_mm512_cvtss_f32(load(logits + label, Tail{1})));
  __mmask16 beaten = 0;
  for_lanes(width, [&](std::int64_t c, auto lanes) {
    const __m512 x = load(logits + c, lanes);
    // Before the label an equal one would have won.
    const std::int64_t before = std::clamp<std::int64_t>(label - c, 0, kLanes);
    const auto earlier = static_cast<__mmask16>((1U << before) - 1);
    beaten = static_cast<__mmask16>(beaten | _mm512_mask_cmp_ps_mask(mask_of(lanes), x, own, _CMP_GT_OQ) |
                                    _mm512_mask_cmp_ps_mask(mask_of(lanes) & earlier, x, own, _CMP_EQ_OQ));
  });
  return beaten == 0;
}

void pack_transposed_pairs(const bf16* x, std::int64_t stride, std::int64_t columns, std::int64_t k, std::int64_t ld,
                           std::uint32_t* out) {
  for (std::int64_t c = 0; c < columns; c += kLanes) {
    for (std::int64_t pair = 0; pair < k / 2; pair += kLanes) {
      __m512i words[16];
      load_transposed(x + c * stride + 2 * pair, stride, columns - c, k - 2 * pair, words);
      const std::int64_t count = std::min(kLanes, k / 2 - pair);
      for (std::int64_t i = 0; i < count; ++i) _mm512_storeu_si512(out + (pair + i) * ld + c, words[i]);
    }
  }
}

void pack_row_pairs(const bf16* x, std::int64_t stride, std::int64_t k, std::int64_t columns, std::int64_t ld,
                    std::uint32_t* out) {
  for (std::int64_t r = 0; r < k; r += 2) {
    const bf16* even = x + r * stride;
    const bf16* odd = even + stride;
    std::uint32_t* to = out + r / 2 * ld;
    for (std::int64_t c = 0; c < columns; c += kLanes) {
      const auto mask = static_cast<__mmask16>(columns - c >= kLanes ? 0xFFFF : (1U << (columns - c)) - 1);
      const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, even + c));
      const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, odd + c));
      _mm512_storeu_si512(to + c, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
  }
}

void transpose(const bf16* x, std::int64_t stride, std::int64_t rows, std::int64_t columns, bf16* out,
               std::int64_t ld) {
  for (std::int64_t r = 0; r < rows; r += kLanes) {
    for (std::int64_t c = 0; c < columns; c += 32) {
      __m512i words[16];
      load_transposed(x + r * stride + c, stride, rows - r, columns - c, words);
      const std::int64_t count = std::min<std::int64_t>(32, columns - c);
      for (std::int64_t i = 0; i < count; ++i) {
        const __m512i word = i % 2 == 0 ? words[i / 2] : _mm512_srli_epi32(words[i / 2], 16);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + (c + i) * ld + r), _mm512_cvtepi32_epi16(word));
      }
    }
  }
}

void round_rows(const float* c, std::int64_t ldc, std::int64_t rows, std::int64_t columns, bf16* out, std::int64_t ld) {
  for (std::int64_t r = 0; r < rows; ++r) {
    for_lanes(columns,
              [&](std::int64_t i, auto lanes) { store(out + r * ld + i, lanes, load(c + r * ldc + i, lanes)); });
  }
}

void add_to(float* grad, const bf16* x, std::int64_t count) {
  for_lanes(count, [&](std::int64_t i, auto lanes) {
    store(grad + i, lanes, _mm512_add_ps(load(grad + i, lanes), load(x + i, lanes)));
  });
}

// ---- weight gradients

namespace {

constexpr std::int64_t kTokens =
    1024;  // of dy and x at a time: fewer passes over the gradient, panels from the second level
constexpr std::int64_t kOutBlock = 48;  // columns of dy packed at a time: eight tiles of six
constexpr std::int64_t kPanel = 64;     // columns of x in one tile

// Rows of the gradient x 16 * kVectors columns, added to what is there. a: [pairs][kOutBlock], b: [pairs][columns].
template <int kRows, int kVectors>
inline __attribute__((always_inline)) void add_tile(const std::uint32_t* a, const std::uint32_t* b, std::int64_t ldb,
                                                    std::int64_t pairs, float* grad, std::int64_t stride) {
  __m512 c[kRows][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) c[i][j] = _mm512_loadu_ps(grad + i * stride + j * kLanes);
  }
  for (std::int64_t kp = 0; kp < pairs; ++kp) {
    __m512i bv[kVectors];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) bv[j] = _mm512_loadu_si512(b + kp * ldb + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const __m512i av = _mm512_set1_epi32(static_cast<int>(a[kp * kOutBlock + i]));
#pragma GCC unroll 4
      for (int j = 0; j < kVectors; ++j) {
        c[i][j] = _mm512_dpbf16_ps(c[i][j], reinterpret_cast<__m512bh>(av), reinterpret_cast<__m512bh>(bv[j]));
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) _mm512_storeu_ps(grad + i * stride + j * kLanes, c[i][j]);
  }
}

template <int kVectors>
void add_rows(const std::uint32_t* a, std::int64_t rows, const std::uint32_t* b, std::int64_t ldb, std::int64_t pairs,
              float* grad, std::int64_t stride) {
  std::int64_t i = 0;
  for (; i + 6 <= rows; i += 6) add_tile<6, kVectors>(a + i, b, ldb, pairs, grad + i * stride, stride);
  for (; i < rows; i += 2) add_tile<2, kVectors>(a + i, b, ldb, pairs, grad + i * stride, stride);
}

}  // namespace

bool transposed_product_fits(std::int64_t tokens, std::int64_t out, std::int64_t in) {
  return tokens % 2 == 0 && in % kLanes == 0 && out % 2 == 0;
}

std::int64_t transposed_product_pieces(std::int64_t tokens, std::int64_t in) {
  return (tokens + kTokens - 1) / kTokens * ((in + kPanel - 1) / kPanel);
}

void pack_piece(const bf16* x, std::int64_t tokens, std::int64_t in, std::int64_t piece, std::uint32_t* x_pairs) {
  const std::int64_t panels = (in + kPanel - 1) / kPanel;
  const std::int64_t t = piece / panels * kTokens, n = piece % panels * kPanel;
  const std::int64_t rows = std::min(kTokens, tokens - t), columns = std::min(kPanel, in - n);
  // Panels of 64 columns, each contiguous: [panel][pairs][64], a last one of what is left.
  pack_row_pairs(x + t * in + n, in, rows, columns, columns, x_pairs + t / 2 * in + n * rows / 2);
}

std::int64_t transposed_product_scratch_bytes() { return kTokens / 2 * kOutBlock * 4 + 64; }

void add_transposed_product(const bf16* dy, const std::uint32_t* x_pairs, float* grad, std::int64_t tokens,
                            std::int64_t out, std::int64_t in, std::int64_t first, std::int64_t last, void* scratch) {
  auto* dy_pairs = static_cast<std::uint32_t*>(scratch);
  for (std::int64_t t = 0; t < tokens; t += kTokens) {
    const std::int64_t rows = std::min(kTokens, tokens - t), pairs = rows / 2;
    const std::uint32_t* chunk = x_pairs + t / 2 * in;
    for (std::int64_t m = first; m < last; m += kOutBlock) {
      const std::int64_t m_rows = std::min(kOutBlock, last - m);
      pack_row_pairs(dy + t * out + m, out, rows, m_rows, kOutBlock, dy_pairs);
      for (std::int64_t n = 0; n < in; n += kPanel) {
        const std::int64_t columns = std::min(kPanel, in - n);
        const std::uint32_t* panel = chunk + n * pairs;
        float* tile = grad + m * in + n;
        if (columns == kPanel) {
          add_rows<4>(dy_pairs, m_rows, panel, columns, pairs, tile, in);
          continue;
        }
        for (std::int64_t c = 0; c < columns; c += kLanes) {
          add_rows<1>(dy_pairs, m_rows, panel + c, columns, pairs, tile + c, in);
        }
      }
    }
  }
}

void softmax(float* scores, std::int64_t ld, std::int64_t rows, std::int64_t columns, float scale, bf16* p,
             std::int64_t ldp, float* log_sum) {
  const __m512 scale_v = _mm512_set1_ps(scale), lowest = _mm512_set1_ps(-3.0e38F);
  for (std::int64_t r = 0; r < rows; ++r) {
    float* row = scores + r * ld;
    __m512 largest = lowest;
    for_lanes(columns, [&](std::int64_t c, auto lanes) {
      largest = _mm512_max_ps(largest, keep(load(row + c, lanes), lanes, lowest));
    });
    const float top = _mm512_reduce_max_ps(largest) * scale;
    const __m512 topv = _mm512_set1_ps(top);
    __m512 sum = _mm512_setzero_ps();
    for_lanes(columns, [&](std::int64_t c, auto lanes) {
      const __m512 e = keep(exp512(_mm512_fmsub_ps(load(row + c, lanes), scale_v, topv)), lanes);
      sum = _mm512_add_ps(sum, e);
      store(row + c, lanes, e);
    });
    const float total = _mm512_reduce_add_ps(sum);
    const __m512 inverse = _mm512_set1_ps(1.0F / total);
    for_lanes(columns, [&](std::int64_t c, auto lanes) {
      store(p + r * ldp + c, lanes, _mm512_mul_ps(load(row + c, lanes), inverse));
    });
    log_sum[r] = top + std::log(total);
  }
}

void softmax_backward(float* scores, float* dp, std::int64_t ld, std::int64_t rows, std::int64_t columns, float scale,
                      const float* log_sum, bf16* p, bf16* ds, std::int64_t ldp) {
  const __m512 scale_v = _mm512_set1_ps(scale);
  for (std::int64_t r = 0; r < rows; ++r) {
    float* row = scores + r * ld;
    const float* d_row = dp + r * ld;
    const __m512 shift = _mm512_set1_ps(log_sum[r]);
    __m512 dot = _mm512_setzero_ps();
    for_lanes(columns, [&](std::int64_t c, auto lanes) {
      const __m512 e = keep(exp512(_mm512_fmsub_ps(load(row + c, lanes), scale_v, shift)), lanes);
      dot = _mm512_fmadd_ps(e, load(d_row + c, lanes), dot);
      store(row + c, lanes, e);
      store(p + r * ldp + c, lanes, e);
    });
    const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(dot));
    for_lanes(columns, [&](std::int64_t c, auto lanes) {
      const __m512 d = _mm512_sub_ps(load(d_row + c, lanes), mean);
      store(ds + r * ldp + c, lanes, _mm512_mul_ps(_mm512_mul_ps(load(row + c, lanes), scale_v), d));
    });
  }
}

}  // namespace cram::kernels::avx512
