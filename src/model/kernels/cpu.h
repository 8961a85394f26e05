// Between the sources of the CPU backend. cpu.cpp has the table row and the element-wise kernels, cpu_products.cpp the
// matrix products, cpu_optimizer.cpp the optimizer.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "model/kernels/avx512.h"
#include "model/kernels/kernels.h"

namespace cram::kernels::cpu {

/// Contiguous bf16 on a processor with AVX512-BF16.
[[nodiscard]] bool takes(const at::Tensor& x);
[[nodiscard]] inline bool is_float(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat && tensor.is_contiguous();
}

[[nodiscard]] inline avx512::bf16* data(const at::Tensor& tensor) {
  return reinterpret_cast<avx512::bf16*>(tensor.data_ptr<at::BFloat16>());
}
[[nodiscard]] inline const avx512::bf16* const_data(const at::Tensor& tensor) {
  return reinterpret_cast<const avx512::bf16*>(tensor.const_data_ptr<at::BFloat16>());
}

[[nodiscard]] at::Tensor product_transposed(const at::Tensor& x, const at::Tensor& weight, WeightPanels& panels);
[[nodiscard]] at::Tensor product(const at::Tensor& dy, const at::Tensor& weight, WeightPanels& panels);
void add_transposed_product_(const at::Tensor& sum, const at::Tensor& dy, const at::Tensor& x);

void adamw_(const std::vector<AdamWPiece>& pieces);
[[nodiscard]] at::Tensor sum_of_squares(const at::Tensor& flat);

}  // namespace cram::kernels::cpu
