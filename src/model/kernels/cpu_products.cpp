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
  constexpr std::int64_t kRows = 48;  // of the gradient; what the kernel packs at a time
  const ThreadScratch scratch(avx512::transposed_product_scratch_bytes(in));
  at::parallel_for(0, (out + kRows - 1) / kRows, 1, [&](std::int64_t first, std::int64_t last) {
    avx512::add_transposed_product(const_data(dy), const_data(x), sum.data_ptr<float>(), tokens, out, in, first * kRows,
                                   std::min(last * kRows, out), scratch.mine());
  });
}

}  // namespace cram::kernels::cpu
