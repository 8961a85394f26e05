// LayerNorm: a warp a row; the sums of the parameters' gradients by columns, chunk by chunk of rows, then over chunks.
#include "model/kernels/cuda/device.cuh"

namespace cram::kernels::cuda::launch {
namespace {

constexpr int kRowsOfBlock = 4;  // one a warp
constexpr int kChunk = 128;      // rows whose parameter gradients are summed together first
constexpr int kRowsAtATime = 8;  // of a chunk

template <class T, int kVec>
__global__ void layer_norm_kernel(T* x, const T* branch, std::int64_t branch_rows, const float* weight,
                                  const float* bias, float eps, T* y, float* mean, float* rstd, std::int64_t rows,
                                  int width) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRowsOfBlock + threadIdx.x / kWarp;
  if (row >= rows) return;
  T* x_row = x + row * width;
  T* y_row = y + row * width;
  float v[kVec];
  float sum = 0;
  for (int c = lane * kVec; c < width; c += kWarp * kVec) {
    load(x_row + c, v);
    if (branch != nullptr) {
      float b[kVec];
      load(branch + row % branch_rows * width + c, b);
#pragma unroll
      for (int i = 0; i < kVec; ++i) v[i] = rounded<T>(v[i] + b[i]);
      store(x_row + c, v);
    }
#pragma unroll
    for (int i = 0; i < kVec; ++i) sum += v[i];
  }
  const float m = warp_sum(sum) / static_cast<float>(width);
  float squares = 0;
  for (int c = lane * kVec; c < width; c += kWarp * kVec) {
    load(x_row + c, v);  // what this lane stored above
#pragma unroll
    for (int i = 0; i < kVec; ++i) squares += (v[i] - m) * (v[i] - m);
  }
  const float s = 1.0F / sqrtf(warp_sum(squares) / static_cast<float>(width) + eps);
  for (int c = lane * kVec; c < width; c += kWarp * kVec) {
    float w[kVec], b[kVec];
    load(x_row + c, v);
    load(weight + c, w);
    load(bias + c, b);
#pragma unroll
    for (int i = 0; i < kVec; ++i) v[i] = (v[i] - m) * s * w[i] + b[i];
    store(y_row + c, v);
  }
  if (lane == 0) {
    mean[row] = m;
    rstd[row] = s;
  }
}

// dx = rstd * (w dy - mean(w dy) - xhat * mean(w dy xhat))
template <class T, int kVec>
__global__ void layer_norm_dx_kernel(const T* dy, const T* x, const float* mean, const float* rstd, const float* weight,
                                     const T* residual, T* dx, std::int64_t rows, int width) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * kRowsOfBlock + threadIdx.x / kWarp;
  if (row >= rows) return;
  const std::int64_t at = row * width;
  const float m = mean[row], s = rstd[row];
  float d[kVec], v[kVec], w[kVec];
  float sum = 0, dot = 0;
  for (int c = lane * kVec; c < width; c += kWarp * kVec) {
    load(dy + at + c, d);
    load(x + at + c, v);
    load(weight + c, w);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      sum += d[i] * w[i];
      dot += d[i] * w[i] * ((v[i] - m) * s);
    }
  }
  const float mean_d = warp_sum(sum) / static_cast<float>(width);
  const float mean_dx = warp_sum(dot) / static_cast<float>(width);
  for (int c = lane * kVec; c < width; c += kWarp * kVec) {
    load(dy + at + c, d);
    load(x + at + c, v);
    load(weight + c, w);
#pragma unroll
    for (int i = 0; i < kVec; ++i) v[i] = s * (d[i] * w[i] - mean_d - (v[i] - m) * s * mean_dx);
    if (residual != nullptr) {
      load(residual + at + c, d);
#pragma unroll
      for (int i = 0; i < kVec; ++i) v[i] += d[i];
    }
    store(dx + at + c, v);
  }
}

// Adds up what the kRowsAtATime threads of a column have; the first of them gets the sum.
template <int kVec>
__device__ void sum_columns(float (&a)[kVec], float (&b)[kVec]) {
  __shared__ float shared[2][kRowsAtATime][kWarp * kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    shared[0][threadIdx.y][threadIdx.x * kVec + i] = a[i];
    shared[1][threadIdx.y][threadIdx.x * kVec + i] = b[i];
  }
  __syncthreads();
  if (threadIdx.y > 0) return;
  for (int y = 1; y < kRowsAtATime; ++y) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      a[i] += shared[0][y][threadIdx.x * kVec + i];
      b[i] += shared[1][y][threadIdx.x * kVec + i];
    }
  }
}

// partial [2][chunks][width]: sums over a chunk of rows of dy * xhat, and of dy. A warp has kVec columns a lane.
template <class T, int kVec>
__global__ void layer_norm_sums_kernel(const T* dy, const T* x, const float* mean, const float* rstd, float* partial,
                                       std::int64_t rows, int width) {
  const int c = static_cast<int>(blockIdx.y * kWarp + threadIdx.x) * kVec;
  const std::int64_t chunks = gridDim.x, chunk = blockIdx.x;
  float dw[kVec] = {}, db[kVec] = {};
  if (c < width) {
    const std::int64_t end = min(rows, (chunk + 1) * kChunk);
#pragma unroll 4
    for (std::int64_t row = chunk * kChunk + threadIdx.y; row < end; row += kRowsAtATime) {
      float d[kVec], v[kVec];
      load(dy + row * width + c, d);
      load(x + row * width + c, v);
      const float m = mean[row], s = rstd[row];
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        dw[i] += d[i] * ((v[i] - m) * s);
        db[i] += d[i];
      }
    }
  }
  sum_columns(dw, db);
  if (threadIdx.y > 0 || c >= width) return;
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    partial[chunk * width + c + i] = dw[i];
    partial[(chunks + chunk) * width + c + i] = db[i];
  }
}

__global__ void layer_norm_add_sums_kernel(const float* partial, std::int64_t chunks, float* weight_grad,
                                           float* bias_grad, int width) {
  const int c = static_cast<int>(blockIdx.x * kWarp + threadIdx.x);
  float dw[1] = {}, db[1] = {};
  if (c < width) {
#pragma unroll 4
    for (std::int64_t chunk = threadIdx.y; chunk < chunks; chunk += kRowsAtATime) {
      dw[0] += partial[chunk * width + c];
      db[0] += partial[(chunks + chunk) * width + c];
    }
  }
  sum_columns(dw, db);
  if (threadIdx.y > 0 || c >= width) return;
  weight_grad[c] += dw[0];
  bias_grad[c] += db[0];
}

}  // namespace

void layer_norm(Element element, void* x, const void* branch, std::int64_t branch_rows, const float* weight,
                const float* bias, float eps, void* y, float* mean, float* rstd, std::int64_t rows, std::int64_t width,
                Stream stream) {
  if (rows == 0) return;
  const bool wide = aligned(x) && aligned(branch) && aligned(weight) && aligned(bias) && aligned(y);
  for_element(element, width, wide, [&](auto t, auto vec) {
    using T = decltype(t);
    start(layer_norm_kernel<T, decltype(vec)::value>, static_cast<unsigned>(divide_up(rows, kRowsOfBlock)),
          kRowsOfBlock * kWarp, stream, static_cast<T*>(x), static_cast<const T*>(branch), branch_rows, weight, bias,
          eps, static_cast<T*>(y), mean, rstd, rows, static_cast<int>(width));
  });
}

std::int64_t layer_norm_partial_size(std::int64_t rows, std::int64_t width) {
  return 2 * divide_up(rows, kChunk) * width;
}

void layer_norm_backward(Element element, const void* dy, const void* x, const float* mean, const float* rstd,
                         const float* weight, const void* residual, void* dx, float* partial, float* weight_grad,
                         float* bias_grad, std::int64_t rows, std::int64_t width, Stream stream) {
  if (rows == 0 || width == 0) return;
  const bool wide = aligned(dy) && aligned(x) && aligned(weight) && aligned(residual) && aligned(dx);
  for_element(element, width, wide, [&](auto t, auto vec) {
    using T = decltype(t);
    start(layer_norm_dx_kernel<T, decltype(vec)::value>, static_cast<unsigned>(divide_up(rows, kRowsOfBlock)),
          kRowsOfBlock * kWarp, stream, static_cast<const T*>(dy), static_cast<const T*>(x), mean, rstd, weight,
          static_cast<const T*>(residual), static_cast<T*>(dx), rows, static_cast<int>(width));
  });
  const std::int64_t chunks = divide_up(rows, kChunk);
  const dim3 block(kWarp, kRowsAtATime);
  for_element(element, width, wide, [&](auto t, auto vec) {
    using T = decltype(t);
    // Two columns a lane of a wide row: whole lines of 128 bytes for bf16, and many blocks.
    constexpr int kColumns = decltype(vec)::value > 1 ? 2 : 1;
    const dim3 grid(static_cast<unsigned>(chunks), static_cast<unsigned>(divide_up(width, kWarp * kColumns)));
    start(layer_norm_sums_kernel<T, kColumns>, grid, block, stream, static_cast<const T*>(dy), static_cast<const T*>(x),
          mean, rstd, partial, rows, static_cast<int>(width));
  });
  start(layer_norm_add_sums_kernel, static_cast<unsigned>(divide_up(width, kWarp)), block, stream, partial, chunks,
        weight_grad, bias_grad, static_cast<int>(width));
}

}  // namespace cram::kernels::cuda::launch
