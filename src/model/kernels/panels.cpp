#include "model/kernels/panels.h"

#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <torch/types.h>

#include <algorithm>

#include "model/kernels/cpu.h"
#include "model/kernels/thread_scratch.h"

namespace cram::kernels {
namespace {

constexpr std::int64_t kTile = 64;          // rows and columns of a tile of the product
constexpr std::int64_t kDepth = 1024;       // of K at a time, where all of it does not fit the second-level cache
constexpr std::int64_t kLongest = 2048;     // K up to which a tile is done in one go
constexpr std::int64_t kRowsAtATime = 512;  // whose x stays in the second-level cache while panels pass
constexpr std::int64_t kPanelsAtATime = 8;
constexpr std::int64_t kTokens = 512;  // of a weight gradient at a time

const avx512::bf16* as_bits(const at::Tensor& tensor) {
  return reinterpret_cast<const avx512::bf16*>(tensor.const_data_ptr<at::BFloat16>());
}

std::int64_t pieces(std::int64_t count, std::int64_t size) { return (count + size - 1) / size; }

// One call of the matrix kernels: c [rows][ldc] (+)= a [rows][lda] times `depth` rows of a panel.
void tile(std::int64_t rows, std::int64_t columns, std::int64_t depth, const avx512::bf16* a, std::int64_t lda,
          const std::uint32_t* panel, float* c, std::int64_t ldc, bool add) {
  at::native::cpublas::brgemm(rows, columns, depth, lda, /*ld_b=*/kTile, ldc, add,
                              reinterpret_cast<const at::BFloat16*>(a), reinterpret_cast<const at::BFloat16*>(panel),
                              c);
}

const std::uint32_t* panel_of(const at::Tensor& panels, std::int64_t number) {
  return reinterpret_cast<const std::uint32_t*>(panels.const_data_ptr<std::int32_t>()) + number * panels.stride(0);
}

std::uint32_t version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

}  // namespace

template <class Pack>
const at::Tensor& WeightPanels::refresh(Packed& packed, const at::Tensor& weight, std::int64_t k, std::int64_t columns,
                                        const Pack& pack) {
  if (packed.of == weight.const_data_ptr() && packed.version == version_of(weight)) return packed.panels;
  const std::int64_t count = pieces(columns, kTile);
  if (!packed.panels.defined() || packed.panels.size(0) != count || packed.panels.size(1) != k / 2) {
    packed.panels = at::empty({count, k / 2, kTile}, weight.options().dtype(at::kInt));
  }
  auto* to = reinterpret_cast<std::uint32_t*>(packed.panels.data_ptr<std::int32_t>());
  at::parallel_for(0, count, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t p = first; p < last; ++p) {
      pack(p * kTile, std::min(kTile, columns - p * kTile), to + p * packed.panels.stride(0));
    }
  });
  packed.of = weight.const_data_ptr();
  packed.version = version_of(weight);
  return packed.panels;
}

const at::Tensor& WeightPanels::transposed(const at::Tensor& weight) {
  const std::int64_t out = weight.size(0), in = weight.size(1);
  return refresh(transposed_, weight, in, out, [&](std::int64_t first, std::int64_t rows, std::uint32_t* to) {
    avx512::pack_transposed_pairs(as_bits(weight) + first * in, in, rows, in, kTile, to);
  });
}

const at::Tensor& WeightPanels::plain(const at::Tensor& weight) {
  const std::int64_t out = weight.size(0), in = weight.size(1);
  return refresh(plain_, weight, out, in, [&](std::int64_t first, std::int64_t columns, std::uint32_t* to) {
    avx512::pack_row_pairs(as_bits(weight) + first, in, out, columns, kTile, to);
  });
}

bool panels_fit(const at::Tensor& weight, std::int64_t k) { return cpu::takes(weight) && k > 0 && k % 2 == 0; }

at::Tensor multiply_panels(const at::Tensor& x, const at::Tensor& panels, std::int64_t columns) {
  const std::int64_t rows = x.size(0), k = x.size(1);
  const at::Tensor y = at::empty({rows, columns}, x.options());
  auto* to = reinterpret_cast<avx512::bf16*>(y.data_ptr<at::BFloat16>());
  const avx512::bf16* from = as_bits(x);
  // A task is some rows and some panels. All of K at once where that is short; else piece after piece over the whole
  // task, whose sums are kept in fp32 meanwhile.
  const bool in_one_go = k <= kLongest;
  const std::int64_t depth = in_one_go ? k : kDepth;
  const std::int64_t row_groups = pieces(rows, kRowsAtATime), groups = pieces(panels.size(0), kPanelsAtATime);
  const std::int64_t sums_width = in_one_go ? kTile : kPanelsAtATime * kTile;
  const std::int64_t sums_rows = in_one_go ? kTile : kRowsAtATime;
  const ThreadScratch scratch(sums_rows * sums_width * static_cast<std::int64_t>(sizeof(float)));
  at::parallel_for(0, row_groups * groups, 1, [&](std::int64_t first, std::int64_t last) {
    auto* sums = static_cast<float*>(scratch.mine());
    for (std::int64_t task = first; task < last; ++task) {
      const std::int64_t row_begin = task / groups * kRowsAtATime, row_end = std::min(row_begin + kRowsAtATime, rows);
      const std::int64_t panel_begin = task % groups * kPanelsAtATime;
      const std::int64_t panel_end = std::min(panel_begin + kPanelsAtATime, panels.size(0));
      for (std::int64_t k_begin = 0; k_begin < k; k_begin += depth) {
        const std::int64_t k_end = std::min(k_begin + depth, k);
        for (std::int64_t p = panel_begin; p < panel_end; ++p) {
          const std::int64_t width = std::min(kTile, columns - p * kTile);
          for (std::int64_t r = row_begin; r < row_end; r += kTile) {
            const std::int64_t height = std::min(kTile, row_end - r);
            float* c = in_one_go ? sums : sums + (r - row_begin) * sums_width + (p - panel_begin) * kTile;
            tile(height, width, k_end - k_begin, from + r * k + k_begin, k, panel_of(panels, p) + k_begin / 2 * kTile,
                 c, sums_width, k_begin > 0);
            if (k_end == k) avx512::round_rows(c, sums_width, height, width, to + r * columns + p * kTile, columns);
          }
        }
      }
    }
    at::native::cpublas::brgemm_release();
  });
  return y;
}

void add_transposed_product_by_tiles(const at::Tensor& sum, const at::Tensor& dy, const at::Tensor& x) {
  const std::int64_t tokens = dy.size(0), out = dy.size(1), in = x.size(1);
  const std::int64_t chunks = pieces(tokens, kTokens), panels = pieces(in, kTile);
  // Every chunk of x as panels, packed once for all threads: [chunk][panel][kTokens/2][64].
  const at::Tensor packed = at::empty({chunks, panels, kTokens / 2, kTile}, x.options().dtype(at::kInt));
  auto* x_pairs = reinterpret_cast<std::uint32_t*>(packed.data_ptr<std::int32_t>());
  const auto tokens_of = [&](std::int64_t chunk) { return std::min(kTokens, tokens - chunk * kTokens); };
  at::parallel_for(0, chunks * panels, 1, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) {
      const std::int64_t chunk = i / panels, column = i % panels * kTile;
      avx512::pack_row_pairs(as_bits(x) + chunk * kTokens * in + column, in, tokens_of(chunk),
                             std::min(kTile, in - column), kTile, x_pairs + i * kTokens / 2 * kTile);
    }
  });
  const ThreadScratch scratch(kTile * kTokens * static_cast<std::int64_t>(sizeof(avx512::bf16)));
  at::parallel_for(0, pieces(out, kTile), 1, [&](std::int64_t first, std::int64_t last) {
    auto* dy_rows = static_cast<avx512::bf16*>(scratch.mine());  // [64][kTokens]
    for (std::int64_t o = first; o < last; ++o) {
      const std::int64_t height = std::min(kTile, out - o * kTile);
      for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
        avx512::transpose(as_bits(dy) + chunk * kTokens * out + o * kTile, out, tokens_of(chunk), height, dy_rows,
                          kTokens);
        for (std::int64_t p = 0; p < panels; ++p) {
          tile(height, std::min(kTile, in - p * kTile), tokens_of(chunk), dy_rows, kTokens,
               x_pairs + (chunk * panels + p) * kTokens / 2 * kTile, sum.data_ptr<float>() + o * kTile * in + p * kTile,
               in, /*add=*/true);
        }
      }
    }
    at::native::cpublas::brgemm_release();
  });
}

bool has_amx() {
  // oneDNN packs for its AMX kernels only, and has asked the system for the tile registers then.
  static const bool available = avx512::is_supported() && at::native::cpublas::could_pack(at::kBFloat16);
  return available;
}

}  // namespace cram::kernels
