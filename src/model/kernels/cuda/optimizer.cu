// AdamW over flat pieces in one launch, and the sum of squares. Compiled without contraction and with denormals flushed
// to zero, as the CPU's loops are: the same bits.
#include <algorithm>

#include "model/kernels/cuda/device.cuh"

namespace cram::kernels::cuda::launch {
namespace {

constexpr int kThreads = 256;
constexpr int kPiecesOfLaunch = 24;  // arguments of a kernel are at most 4 KB
constexpr std::int64_t kSquaresChunk = kOptimizerChunk;

struct Pieces {
  FlatPiece of[kPiecesOfLaunch];
};
static_assert(sizeof(Pieces) <= 4096);

template <int kVec>
__device__ void update(const FlatPiece& p, std::int64_t at) {
  const AdamWCoefficients<float>& c = p.coefficients;
  float g[kVec], m[kVec], v[kVec], w[kVec];
  load(p.grad + at, g);
  load(p.exp_avg + at, m);
  load(p.exp_avg_sq + at, v);
  load(p.master + at, w);
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    g[i] = g[i] * c.scale;
    m[i] = c.beta1 * m[i] + c.one_minus_beta1 * g[i];
    v[i] = c.beta2 * v[i] + c.one_minus_beta2 * g[i] * g[i];
    w[i] = c.keep * w[i] - c.step_size * m[i] / (sqrtf(v[i]) / c.root_bias + c.eps);
    g[i] = 0;
  }
  store(p.exp_avg + at, m);
  store(p.exp_avg_sq + at, v);
  store(p.master + at, w);
  store(p.grad + at, g);
  if (p.working == nullptr) return;
  if (p.working_element == Element::kBf16) {
    store(static_cast<Bf16*>(p.working) + at, w);
  } else {
    store(static_cast<float*>(p.working) + at, w);
  }
}

__global__ void __launch_bounds__(kThreads) adamw_kernel(const __grid_constant__ Pieces pieces) {
  const FlatPiece& p = pieces.of[blockIdx.y];
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads;
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const auto address = [](const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); };
  const bool wide =
      (address(p.master) | address(p.grad) | address(p.exp_avg) | address(p.exp_avg_sq) | address(p.working)) % 16 == 0;
  const std::int64_t runs = wide ? p.count / 4 : 0;
  for (std::int64_t i = thread; i < runs; i += stride) update<4>(p, i * 4);
  for (std::int64_t i = runs * 4 + thread; i < p.count; i += stride) update<1>(p, i);
}

__global__ void __launch_bounds__(kThreads) squares_kernel(const float* values, std::int64_t count, double* partial) {
  __shared__ double shared[kThreads / kWarp];
  const std::int64_t begin = blockIdx.x * kSquaresChunk, end = min(count, begin + kSquaresChunk);
  double sum = 0;
#pragma unroll 4
  for (std::int64_t i = begin + threadIdx.x; i < end; i += kThreads) {
    const double value = values[i];
    sum += value * value;
  }
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kThreads) add_up_kernel(const double* partial, std::int64_t count, double* total) {
  __shared__ double shared[kThreads / kWarp];
  double sum = 0;
  for (std::int64_t i = threadIdx.x; i < count; i += kThreads) sum += partial[i];
  sum = block_sum(sum, shared);
  if (threadIdx.x == 0) *total = sum;
}

}  // namespace

void adamw(const std::vector<FlatPiece>& pieces, Stream stream) {
  for (std::size_t first = 0; first < pieces.size(); first += kPiecesOfLaunch) {
    const std::size_t end = std::min(pieces.size(), first + kPiecesOfLaunch);
    Pieces some{};
    std::int64_t largest = 0;
    for (std::size_t i = first; i < end; ++i) {
      some.of[i - first] = pieces[i];
      largest = std::max(largest, pieces[i].count);
    }
    if (largest == 0) continue;
    const dim3 grid(static_cast<unsigned>(std::clamp<std::int64_t>(divide_up(largest, 4 * kThreads), 1, 4096)),
                    static_cast<unsigned>(end - first));
    start(adamw_kernel, grid, kThreads, stream, some);
  }
}

std::int64_t squares_partial_size(std::int64_t count) { return divide_up(count, kSquaresChunk); }

void sum_of_squares(const float* values, std::int64_t count, double* partial, double* sum, Stream stream) {
  const std::int64_t chunks = squares_partial_size(count);
  if (chunks > 0) start(squares_kernel, static_cast<unsigned>(chunks), kThreads, stream, values, count, partial);
  start(add_up_kernel, 1, kThreads, stream, partial, chunks, sum);
}

}  // namespace cram::kernels::cuda::launch
