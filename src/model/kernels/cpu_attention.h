// Self-attention of bf16 rows on the CPU, one head of one row at a time: its products through oneDNN's small matrix
// kernels (AMX where there is one, AVX512-BF16 otherwise), everything between them in fp32 without leaving the
// second-level cache.
#pragma once

#include "model/kernels/avx512.h"

namespace cram::kernels {

/// The sizes of one head: S an even number up to 512, d an even number up to 128.
struct HeadShape {
  std::int64_t seq = 0, head_dim = 0;
  std::int64_t keys = 0;            ///< of S, the first ones: the others are padding that nothing attends to
  std::int64_t stride = 0;          ///< elements between rows of q (k and v follow q at distances d, 2d)
  std::int64_t context_stride = 0;  ///< elements between rows of the context

  [[nodiscard]] bool fits() const {
    return seq > 0 && seq % 2 == 0 && seq <= 512 && head_dim > 0 && head_dim % 2 == 0 && head_dim <= 128;
  }
  /// Bytes of scratch memory for one head.
  [[nodiscard]] std::int64_t scratch_bytes() const;
};

/// qkv points to the head's first q. context [S][d]; log_sum [S] of the scaled scores.
void attend_head(const HeadShape& shape, const avx512::bf16* qkv, avx512::bf16* context, float* log_sum, void* scratch);

/// d_qkv in the layout of qkv. The probabilities are made again from q, k and log_sum.
void attend_head_backward(const HeadShape& shape, const avx512::bf16* qkv, const avx512::bf16* d_context,
                          const float* log_sum, avx512::bf16* d_qkv, void* scratch);

/// Some of a row's S queries: number i of them is the query at position picks[order[i]] - first, and row order[i] of
/// the context.
struct HeadPicks {
  const std::int64_t* picks = nullptr;
  const std::int64_t* order = nullptr;
  std::int64_t count = 0;
  std::int64_t first = 0;

  [[nodiscard]] std::int64_t row(std::int64_t i) const { return order[i]; }
  [[nodiscard]] std::int64_t position(std::int64_t i) const { return picks[order[i]] - first; }
};

/// The same of some queries alone: context and d_context are the picked rows', log_sum [S] is that of their positions,
/// and d_qkv is written whole.
void attend_picked(const HeadShape& shape, const HeadPicks& picks, const avx512::bf16* qkv, avx512::bf16* context,
                   float* log_sum, void* scratch);
void attend_picked_backward(const HeadShape& shape, const HeadPicks& picks, const avx512::bf16* qkv,
                            const avx512::bf16* d_context, const float* log_sum, avx512::bf16* d_qkv, void* scratch);

/// To be called by each thread after its last head: gives the tile registers back.
void release_attention();

}  // namespace cram::kernels
