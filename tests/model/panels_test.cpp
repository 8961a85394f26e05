// Products with packed weights against fp64 on the same bf16 operands: sizes around tiles, groups and pieces of K;
// packs that follow the weight; the tile form of the weight gradient, which AMX uses, on whatever processor runs this.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include "base/check.h"
#include "model/kernels/avx512.h"
#include "model/kernels/kernels.h"
#include "model/kernels/panels.h"
#include "model/linear.h"
#include "support/golden.h"

namespace cram::test {
namespace {

#define CRAM_NEEDS_FUSED()              \
  if (!kernels::avx512::is_supported()) \
  GTEST_SKIP() << "this processor has no AVX512-BF16: only ATen's products run here"

at::Tensor random_bf16(std::vector<std::int64_t> shape, std::uint64_t seed) {
  return at::randn(shape, at::detail::createCPUGenerator(seed), at::kFloat).to(at::kBFloat16);
}

at::Tensor wide(const at::Tensor& t) { return t.to(at::kDouble); }

struct Size {
  std::int64_t rows, in, out;
};

// Tiles are 64 x 64, groups 512 rows x 512 columns, K whole up to 2048 and in pieces of 1024 beyond.
const Size kSizes[] = {{0, 16, 16},   {1, 2, 1},      {1, 32, 64},     {63, 30, 65},     {65, 62, 100},
                       {130, 34, 63}, {513, 96, 640}, {40, 2048, 130}, {70, 2050, 1030}, {600, 3074, 20}};

TEST(Panels, ProductsAreExactUpToOneRounding) {
  CRAM_NEEDS_FUSED();
  for (const Size& size : kSizes) {
    const std::string what = concat(size.rows, " x ", size.in, " x ", size.out);
    const at::Tensor x = random_bf16({size.rows, size.in}, 1), w = random_bf16({size.out, size.in}, 2);
    const at::Tensor dy = random_bf16({size.rows, size.out}, 3);
    kernels::WeightPanels panels;
    const at::Tensor y = kernels::product_transposed(x, w, panels), dx = kernels::product(dy, w, panels);
    ASSERT_EQ(y.sizes(), at::mm(x, w.t()).sizes()) << what;
    ASSERT_EQ(dx.sizes(), x.sizes()) << what;
    if (size.rows == 0) continue;
    // One rounding to bf16 is 2^-9 at most, about 0.0017 in norm.
    EXPECT_LE(norm_error(y, at::mm(wide(x), wide(w).t())), 2e-3) << what;
    EXPECT_LE(norm_error(dx, at::mm(wide(dy), wide(w))), 2e-3) << what;
    // Before the rounding they are fp32 sums: where the result is representable it is exact.
    const at::Tensor ones = at::ones_like(x);
    EXPECT_LE((wide(kernels::product_transposed(ones, at::ones_like(w), panels)) - static_cast<double>(size.in))
                  .abs()
                  .max()
                  .item<double>(),
              static_cast<double>(size.in) * 0x1p-8)
        << what;
  }
}

TEST(Panels, SameBitsForAnyNumberOfThreads) {
  CRAM_NEEDS_FUSED();
  const int before = at::get_num_threads();
  for (const Size& size : {Size{1100, 64, 1200}, Size{600, 2100, 130}}) {
    const at::Tensor x = random_bf16({size.rows, size.in}, 1), w = random_bf16({size.out, size.in}, 2);
    const at::Tensor dy = random_bf16({size.rows, size.out}, 3);
    std::vector<std::vector<at::Tensor>> found;
    for (const int threads : {1, 2, 3}) {
      at::set_num_threads(threads);
      kernels::WeightPanels panels;
      const at::Tensor sum = at::zeros({size.out, size.in});
      kernels::add_transposed_product_by_tiles(sum, dy, x);
      found.push_back({kernels::product_transposed(x, w, panels), kernels::product(dy, w, panels), sum});
    }
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_TRUE(at::equal(found[0][i], found[1][i]) && at::equal(found[0][i], found[2][i])) << i;
    }
  }
  at::set_num_threads(before);
}

TEST(Panels, WeightGradientByTilesIsSummedInFp32) {
  CRAM_NEEDS_FUSED();
  for (const Size& size : kSizes) {
    if (size.rows % 2 != 0) continue;
    const std::string what = concat(size.rows, " x ", size.in, " x ", size.out);
    const at::Tensor x = random_bf16({size.rows, size.in}, 1), dy = random_bf16({size.rows, size.out}, 2);
    const at::Tensor sum = at::ones({size.out, size.in});
    kernels::add_transposed_product_by_tiles(sum, dy, x);
    EXPECT_LE(norm_error(sum, at::mm(wide(dy).t(), wide(x)) + 1), 1e-6) << what;
  }
}

TEST(Panels, FollowTheWeight) {
  CRAM_NEEDS_FUSED();
  const at::Tensor flat = random_bf16({2 * 64 * 32}, 1);
  const at::Tensor w = flat.narrow(0, 64 * 32, 64 * 32).view({64, 32});  // as the parameter store's views are
  const at::Tensor x = random_bf16({8, 32}, 2), dy = random_bf16({8, 64}, 3);
  kernels::WeightPanels panels;
  const auto expect_current = [&](const std::string& what) {
    EXPECT_LE(norm_error(kernels::product_transposed(x, w, panels), at::mm(wide(x), wide(w).t())), 4e-3) << what;
    EXPECT_LE(norm_error(kernels::product(dy, w, panels), at::mm(wide(dy), wide(w))), 4e-3) << what;
  };
  expect_current("at first");
  w.mul_(2);
  expect_current("after writing the view");
  flat.add_(1);
  expect_current("after writing the flat buffer");
  auto* raw = reinterpret_cast<std::uint16_t*>(flat.data_ptr<at::BFloat16>());
  for (std::int64_t i = 0; i < flat.numel(); ++i) raw[i] ^= 0x8000U;
  // Nobody has said so yet: the old weight is still used. (If this fails, packing happens at every product.)
  EXPECT_LE(norm_error(kernels::product(dy, w, panels), at::mm(wide(dy), -wide(w))), 4e-3);
  flat.unsafeGetTensorImpl()->bump_version();
  expect_current("after bumping the version");
}

TEST(Panels, StoreTellsOfRawWrites) {
  CRAM_NEEDS_FUSED();
  ParameterStore store;
  const ParamId id =
      store.add({.name = "w.weight", .global_shape = {64, 32}, .init = InitRule::kNormal, .init_value = 1.0});
  store.allocate(Precision::kBf16, at::kCPU, test::adam_states());
  store.initialize(1);
  const at::Tensor x = random_bf16({8, 32}, 2);
  kernels::WeightPanels panels;
  (void)matmul(x, store.weight(id), panels);
  auto* raw = reinterpret_cast<std::uint16_t*>(store.buffers()[0].working.data_ptr<at::BFloat16>());
  for (std::int64_t i = 0; i < 64 * 32; ++i) raw[i] ^= 0x8000U;
  store.weights_written();
  EXPECT_LE(norm_error(matmul(x, store.weight(id), panels), at::mm(wide(x), wide(store.weight(id)).t())), 4e-3);
}

}  // namespace
}  // namespace cram::test
