// What a training step eats. Legend: B rows, S tokens a row, M masked positions in all.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace cram {

struct Batch {
  at::Tensor ids;        ///< [B,S] int64, masked input
  at::Tensor labels;     ///< [M] int64, the original ids at the positions
  at::Tensor positions;  ///< [M] int64, flat index b*S+s, ascending
  std::int64_t rows = 0;
};

}  // namespace cram
