// Products with weights kept as panels, for bf16 on CPUs with AVX512-BF16 or AMX: y = x W^T and dx = dy W, tile by tile
// through the matrix kernels that LibTorch brings (oneDNN's brgemm: AMX where there is one, AVX512-BF16 otherwise),
// with fp32 sums that are rounded once. A weight is packed once an optimizer step instead of at every product.
//
// A panel is 64 columns of the product: [K/2][64] pairs of neighbouring k, the order in which the dot-product
// instructions read them. Tiles are computed alone and in a fixed order: the same bits for any number of threads.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace cram::kernels {

/// What products keep of a weight between its updates. Made again when the weight's version counter has moved: whoever
/// writes weights without ATen operators must bump it (ParameterStore::weights_written).
class WeightPanels {
 public:
  /// weight [out,in] as the right operand of x W^T, K = in.
  [[nodiscard]] const at::Tensor& transposed(const at::Tensor& weight);
  /// weight [out,in] as the right operand of dy W, K = out.
  [[nodiscard]] const at::Tensor& plain(const at::Tensor& weight);

 private:
  struct Packed {
    at::Tensor panels;  // [ceil(columns/64), K/2, 64] pairs of bf16 as int32
    std::uint32_t version = 0;
    const void* of = nullptr;
  };
  /// Packs again where the weight has changed: pack(first column, columns, panel) for panels of K = k.
  template <class Pack>
  [[nodiscard]] static const at::Tensor& refresh(Packed& packed, const at::Tensor& weight, std::int64_t k,
                                                 std::int64_t columns, const Pack& pack);
  Packed transposed_, plain_;
};

/// True for a weight that can be packed for products over K of its elements: contiguous bf16 of a CPU that has the
/// instructions, K even.
[[nodiscard]] bool panels_fit(const at::Tensor& weight, std::int64_t k);

/// y [N,columns] = x [N,K] times the panels.
[[nodiscard]] at::Tensor multiply_panels(const at::Tensor& x, const at::Tensor& panels, std::int64_t columns);

/// sum += dy^T x through the same matrix kernels: for AMX, where they are faster than avx512::add_transposed_product.
/// dy [N,out], x [N,in] bf16, sum [out,in] fp32; N even.
void add_transposed_product_by_tiles(const at::Tensor& sum, const at::Tensor& dy, const at::Tensor& x);

/// True when this processor has AMX for bf16 and the system lets this process use it.
[[nodiscard]] bool has_amx();

}  // namespace cram::kernels
