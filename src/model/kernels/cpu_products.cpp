// Matrix products of the CPU backend.
#include <ATen/Parallel.h>
#include <torch/types.h>

#include <algorithm>

#include "model/kernels/backend.h"
#include "model/kernels/cpu.h"
#include "model/kernels/panels.h"
#include "model/kernels/thread_scratch.h"

namespace cram::kernels::cpu {

at::Tensor product_transposed(const at::Tensor& x, const at::Tensor& weight, WeightPanels& panels) {
  if (!panels_fit(weight, weight.size(1))) return at::mm(x, weight.t());
  return multiply_panels(x, panels.transposed(weight), weight.size(0));
}

at::Tensor product(const at::Tensor& dy, const at::Tensor& weight, WeightPanels& panels) {
  if (!panels_fit(weight, weight.size(0))) return at::mm(dy, weight);
  return multiply_panels(dy, panels.plain(weight), weight.size(1));
}

void add_transposed_product_(const at::Tensor& sum, const at::Tensor& dy, const at::Tensor& x) {
  const std::int64_t tokens = dy.size(0), out = dy.size(1), in = x.size(1);
  const bool fits = takes(x) && is_float(sum) && tokens % 2 == 0;
  if (fits && has_amx()) {
    add_transposed_product_by_tiles(sum, dy, x);
    return;
  }
  if (!fits || !avx512::transposed_product_fits(tokens, out, in)) {
    composed::add_transposed_product_(sum, dy, x);
    return;
  }
  constexpr std::int64_t kRows = 6;  // of the gradient: the rows of the kernel's tile, so that threads get equal parts
  const at::Tensor packed = at::empty({tokens / 2, in}, x.options().dtype(at::kInt));
  auto* x_pairs = reinterpret_cast<std::uint32_t*>(packed.data_ptr<std::int32_t>());
  at::parallel_for(0, avx512::transposed_product_pieces(tokens, in), 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t piece = first; piece < last; ++piece)
      avx512::pack_piece(const_data(x), tokens, in, piece, x_pairs);
  });
  const ThreadScratch scratch(avx512::transposed_product_scratch_bytes());
  at::parallel_for(0, (out + kRows - 1) / kRows, 1, [&](std::int64_t first, std::int64_t last) {
    avx512::add_transposed_product(const_data(dy), x_pairs, sum.data_ptr<float>(), tokens, out, in, first * kRows,
                                   std::min(last * kRows, out), scratch.mine());
  });
}

}  // namespace cram::kernels::cpu
