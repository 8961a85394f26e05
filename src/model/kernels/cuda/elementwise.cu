// GEGLU, and a wide sum plus a narrow tensor.
#include <algorithm>

#include "model/kernels/cuda/device.cuh"

namespace cram::kernels::cuda::launch {
namespace {

constexpr int kThreads = 256;

// Distribution function of the normal distribution.
__device__ float normal_cdf(float x) { return fmaf(0.5F, erff(x * 0.70710678F), 0.5F); }

template <class T, int kVec>
__global__ void geglu_kernel(const T* u, T* out, int half) {
  const std::int64_t row = blockIdx.x;
  const T* value = u + row * 2 * half;
  for (int c = static_cast<int>(threadIdx.x) * kVec; c < half; c += static_cast<int>(blockDim.x) * kVec) {
    float v[kVec], g[kVec];
    load(value + c, v);
    load(value + half + c, g);
#pragma unroll
    for (int i = 0; i < kVec; ++i) v[i] *= g[i] * normal_cdf(g[i]);
    store(out + row * half + c, v);
  }
}

template <class T, int kVec>
__global__ void geglu_backward_kernel(const T* d_out, const T* u, T* du, int half) {
  const std::int64_t row = blockIdx.x;
  const T* value = u + row * 2 * half;
  T* d_value = du + row * 2 * half;
  for (int c = static_cast<int>(threadIdx.x) * kVec; c < half; c += static_cast<int>(blockDim.x) * kVec) {
    float d[kVec], v[kVec], g[kVec];
    load(d_out + row * half + c, d);
    load(value + c, v);
    load(value + half + c, g);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      // gelu'(g) = cdf(g) + g * pdf(g)
      const float cdf = normal_cdf(g[i]);
      const float density = 0.39894228F * expf(-0.5F * g[i] * g[i]);
      const float d_gate = d[i] * v[i] * fmaf(g[i], density, cdf);
      v[i] = d[i] * (g[i] * cdf);
      g[i] = d_gate;
    }
    store(d_value + c, v);
    store(d_value + half + c, g);
  }
}

template <class T, int kVec>
__global__ void add_to_kernel(float* sum, const T* x, std::int64_t count) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * kThreads;
  const std::int64_t thread = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const std::int64_t runs = count / kVec;
  for (std::int64_t i = thread; i < runs; i += stride) {
    float s[kVec], v[kVec];
    load(sum + i * kVec, s);
    load(x + i * kVec, v);
#pragma unroll
    for (int k = 0; k < kVec; ++k) s[k] += v[k];
    store(sum + i * kVec, s);
  }
  for (std::int64_t i = runs * kVec + thread; i < count; i += stride) sum[i] += widen(x[i]);
}

unsigned threads_for(std::int64_t runs) {
  return static_cast<unsigned>(std::min<std::int64_t>(kThreads, divide_up(runs, kWarp) * kWarp));
}

}  // namespace

void geglu(Element element, const void* u, void* out, std::int64_t rows, std::int64_t half, Stream stream) {
  if (rows == 0 || half == 0) return;
  for_element(element, half, aligned(u) && aligned(out), [&](auto t, auto vec) {
    using T = decltype(t);
    constexpr int kVec = decltype(vec)::value;
    start(geglu_kernel<T, kVec>, static_cast<unsigned>(rows), threads_for(divide_up(half, kVec)), stream,
          static_cast<const T*>(u), static_cast<T*>(out), static_cast<int>(half));
  });
}

void geglu_backward(Element element, const void* d_out, const void* u, void* du, std::int64_t rows, std::int64_t half,
                    Stream stream) {
  if (rows == 0 || half == 0) return;
  for_element(element, half, aligned(d_out) && aligned(u) && aligned(du), [&](auto t, auto vec) {
    using T = decltype(t);
    constexpr int kVec = decltype(vec)::value;
    start(geglu_backward_kernel<T, kVec>, static_cast<unsigned>(rows), threads_for(divide_up(half, kVec)), stream,
          static_cast<const T*>(d_out), static_cast<const T*>(u), static_cast<T*>(du), static_cast<int>(half));
  });
}

void add_to(Element element, float* sum, const void* x, std::int64_t count, Stream stream) {
  if (count == 0) return;
  // Width 0: what is left of the last run is added one by one.
  for_element(element, /*width=*/0, aligned(sum) && aligned(x), [&](auto t, auto vec) {
    using T = decltype(t);
    constexpr int kVec = decltype(vec)::value;
    const std::int64_t blocks = std::clamp<std::int64_t>(divide_up(count / kVec, kThreads), 1, 4096);
    start(add_to_kernel<T, kVec>, static_cast<unsigned>(blocks), kThreads, stream, sum, static_cast<const T*>(x),
          count);
  });
}

}  // namespace cram::kernels::cuda::launch
