// What the CUDA kernels share: elements and runs of them, sums over warps and blocks in a fixed order, and the launch.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "model/kernels/cuda/launch.h"

namespace cram::kernels::cuda::launch {

constexpr int kWarp = 32;

struct Bf16 {
  unsigned short bits;
};

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(Bf16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
template <class T>
__device__ T narrow(float x);
template <>
__device__ inline float narrow<float>(float x) {
  return x;
}
template <>
__device__ inline Bf16 narrow<Bf16>(float x) {
  return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
}
/// x as it is after it was stored as a T.
template <class T>
__device__ inline float rounded(float x) {
  return widen(narrow<T>(x));
}

/// Elements in 16 bytes, the widest load there is on every architecture.
template <class T>
constexpr int kWide = 16 / static_cast<int>(sizeof(T));

template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Run {
  T values[kCount];
};

/// kVec elements from p on, in loads of up to 16 bytes: p is aligned to these, or kVec is 1.
template <int kVec, class T>
__device__ inline void load(const T* p, float (&out)[kVec]) {
  constexpr int kRun = kVec < kWide<T> ? kVec : kWide<T>;
#pragma unroll
  for (int at = 0; at < kVec; at += kRun) {
    const auto run = *reinterpret_cast<const Run<T, kRun>*>(p + at);
#pragma unroll
    for (int i = 0; i < kRun; ++i) out[at + i] = widen(run.values[i]);
  }
}

template <int kVec, class T>
__device__ inline void store(T* p, const float (&x)[kVec]) {
  constexpr int kRun = kVec < kWide<T> ? kVec : kWide<T>;
#pragma unroll
  for (int at = 0; at < kVec; at += kRun) {
    Run<T, kRun> run;
#pragma unroll
    for (int i = 0; i < kRun; ++i) run.values[i] = narrow<T>(x[at + i]);
    *reinterpret_cast<Run<T, kRun>*>(p + at) = run;
  }
}

/// The same bits in every lane: each step adds the same two numbers in both.
template <class Real>
__device__ inline Real warp_sum(Real x) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffU, x, distance);
  return x;
}

/// Sum over a one-dimensional block of whole warps, in every thread. `shared` has an element a warp.
template <class Real>
__device__ inline Real block_sum(Real x, Real* shared) {
  x = warp_sum(x);
  __syncthreads();  // the last use of `shared` is over
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = x;
  __syncthreads();
  Real sum = 0;
  for (unsigned warp = 0; warp < blockDim.x / kWarp; ++warp) sum += shared[warp];
  return sum;
}

// ---- on the host

/// Starts `kernel` with `args`. Tests compile these files for the host, where a block's threads take turns.
template <class... Parameters, class... Arguments>
void start(void (*kernel)(Parameters...), dim3 grid, dim3 block, Stream stream, const Arguments&... args) {
#ifdef CRAM_EMULATED_CUDA
  (void)stream;
  emulate(grid, block, [&] { kernel(args...); });
#else
  kernel<<<grid, block, 0, stream>>>(args...);
#endif
}

[[nodiscard]] inline std::int64_t divide_up(std::int64_t x, std::int64_t by) { return (x + by - 1) / by; }

[[nodiscard]] inline bool aligned(const void* p, std::uintptr_t bytes = 16) {
  return reinterpret_cast<std::uintptr_t>(p) % bytes == 0;
}

/// Calls body(T{}, integral_constant<int, elements at a time>) with wide runs where rows of `width` and all pointers
/// allow it, else one by one.
template <int kCount>
struct Width {
  static constexpr int value = kCount;
};
template <class Body>
void for_element(Element element, std::int64_t width, bool all_aligned, const Body& body) {
  if (element == Element::kBf16) {
    if (all_aligned && width % kWide<Bf16> == 0) {
      body(Bf16{}, Width<kWide<Bf16>>{});
    } else {
      body(Bf16{}, Width<1>{});
    }
  } else {
    if (all_aligned && width % kWide<float> == 0) {
      body(float{}, Width<kWide<float>>{});
    } else {
      body(float{}, Width<1>{});
    }
  }
}

}  // namespace cram::kernels::cuda::launch
