// CUDA on the host, for tests of the kernels' logic where no GPU is: found before the toolkit's header of this name
// when a .cu file is compiled as C++. The threads of a block are coroutines that take turns until all of them (of the
// warp, of the block) wait; blocks run one after the other, so that shared memory is static. What it cannot show: races
// between warps that happen to take the right turns, and anything about speed.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#define __global__
#define __device__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(threads)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}  // NOLINT: CUDA's is implicit
};
inline dim3 threadIdx, blockIdx, blockDim, gridDim;

using std::max;
using std::min;

namespace emulated_cuda {

/// Runs all blocks of a kernel. Throws std::logic_error for an illegal launch, for threads that wait for one another
/// for ever, and for a shuffle that a part of a warp does not reach.
void run(dim3 grid, dim3 block, const std::function<void()>& thread);
/// Threads and blocks in the opposite order from now on: results must not depend on it.
void reverse(bool on);

void wait_for_block();
void wait_for_warp();
/// 16 bytes of a thread of this block, counted from the current one by exclusive or.
[[nodiscard]] char* slot(int lane_distance);
[[nodiscard]] int any_of_block(int value);

}  // namespace emulated_cuda

inline void emulate(dim3 grid, dim3 block, const std::function<void()>& thread) {
  emulated_cuda::run(grid, block, thread);
}
inline void __syncthreads() { emulated_cuda::wait_for_block(); }
inline int __syncthreads_or(int value) { return emulated_cuda::any_of_block(value); }

template <class T>
T __shfl_xor_sync(unsigned /*mask*/, T value, int distance) {
  std::memcpy(emulated_cuda::slot(0), &value, sizeof value);
  emulated_cuda::wait_for_warp();
  T other;
  std::memcpy(&other, emulated_cuda::slot(distance), sizeof other);
  emulated_cuda::wait_for_warp();
  return other;
}

struct __nv_bfloat16 {
  unsigned short bits;
};
inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const auto bits = std::bit_cast<unsigned>(x);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return {0x7FFF};
  return {static_cast<unsigned short>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16)};
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
