// A vocabulary cut over tensor ranks: who owns which rows of the tied embedding, and the loss on logits that are never
// gathered (Shoeybi et al. 2019, section 3; Narayanan et al. 2021).
//
// Legend: M masked positions, V vocabulary, R rows of this rank (padding included), t tensor ranks.
#pragma once

#include <ATen/core/Tensor.h>

#include "model/kernels/kernels.h"
#include "parallel/communicator.h"

namespace cram {

/// Rows [begin, begin + rows) of the padded vocabulary; the first `valid` of them are real.
struct VocabularyRange {
  std::int64_t begin = 0;
  std::int64_t rows = 0;
  std::int64_t valid = 0;
};

/// All of it for one rank; otherwise equal parts, each a multiple of 32 rows. A small vocabulary may leave ranks
/// without real rows.
[[nodiscard]] VocabularyRange vocabulary_range(std::int64_t vocab_size, int tensor_rank, int tensor_size);

/// kernels::cross_entropy_ on logits [M,R] of this rank's rows against global labels [M]: the same result on every
/// rank. Padded columns are not in the sum and their gradient is exactly 0. Moves 2 values a position (4 without
/// gradient).
[[nodiscard]] kernels::CrossEntropy vocabulary_cross_entropy_(const at::Tensor& logits, const at::Tensor& labels,
                                                              bool write_gradient, const VocabularyRange& range,
                                                              Communicator& tensor);

/// Logits [M,V] from every rank's [M,R]; for showing predictions, never in training.
[[nodiscard]] at::Tensor gather_logits(const at::Tensor& logits, std::int64_t vocab_size, Communicator& tensor);

}  // namespace cram
