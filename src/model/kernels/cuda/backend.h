// Between the sources of the CUDA backend. backend.cpp has the table row, products.cpp the matrix products.
#pragma once

#include "model/kernels/kernels.h"

namespace cram::kernels::cuda {

/// Contiguous bf16 or fp32 on a GPU.
[[nodiscard]] bool takes(const at::Tensor& x);

[[nodiscard]] at::Tensor product_transposed(const at::Tensor& x, const at::Tensor& weight, WeightPanels& panels);
[[nodiscard]] at::Tensor product(const at::Tensor& dy, const at::Tensor& weight, WeightPanels& panels);
void add_transposed_product_(const at::Tensor& sum, const at::Tensor& dy, const at::Tensor& x);

}  // namespace cram::kernels::cuda
