// Cross entropy of one row of logits a block: the largest logit and the sum of exponentials in one reading, the
// gradient in a second one.
#include <cfloat>

#include "model/kernels/cuda/device.cuh"

namespace cram::kernels::cuda::launch {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;

// sum = sum of exp(x - top), of what was seen so far.
struct RunningSum {
  float top = -FLT_MAX;
  float sum = 0;

  __device__ void raise(float to) {
    if (to <= top) return;
    sum *= expf(top - to);
    top = to;
  }
  __device__ void merge(float other_top, float other_sum) {
    const float both = fmaxf(top, other_top);
    sum = sum * expf(top - both) + other_sum * expf(other_top - both);
    top = both;
  }
};

template <class T, int kVec>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_kernel(T* logits, const std::int64_t* labels, double* loss, std::int64_t* correct,
                         bool write_gradient, int width) {
  __shared__ float tops[kWarps], sums[kWarps];
  const std::int64_t row = blockIdx.x;
  T* x = logits + row * width;
  const auto label = static_cast<int>(labels[row]);
  const float own = widen(x[label]);
  // The label's term stays apart: at a low loss it is nearly all of the sum, and what is left of it counts.
  RunningSum others;
  bool beaten = false;
  for (int c = static_cast<int>(threadIdx.x) * kVec; c < width; c += kThreads * kVec) {
    float v[kVec];
    load(x + c, v);
    float top = -FLT_MAX;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (c + i == label) continue;
      top = fmaxf(top, v[i]);
      beaten = beaten || v[i] > own || (v[i] == own && c + i < label);
    }
    others.raise(top);
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      if (c + i != label) others.sum += expf(v[i] - others.top);
    }
  }
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const float top = __shfl_xor_sync(0xffffffffU, others.top, distance);
    const float sum = __shfl_xor_sync(0xffffffffU, others.sum, distance);
    others.merge(top, sum);
  }
  if (threadIdx.x % kWarp == 0) {
    tops[threadIdx.x / kWarp] = others.top;
    sums[threadIdx.x / kWarp] = others.sum;
  }
  const bool any_beaten = __syncthreads_or(beaten ? 1 : 0) != 0;  // and all of `tops` is written, all of x read
  others = RunningSum{tops[0], sums[0]};
  for (int warp = 1; warp < kWarps; ++warp) others.merge(tops[warp], sums[warp]);
  others.merge(own, 0);  // scaled to the largest of all
  const float total = others.sum + expf(own - others.top);
  const float log_total = logf(total);
  if (threadIdx.x == 0) {
    loss[row] = own == others.top
                    ? log1p(static_cast<double>(others.sum))
                    : static_cast<double>(others.top) - static_cast<double>(own) + log(static_cast<double>(total));
    if (!write_gradient) correct[row] = any_beaten ? 0 : 1;
  }
  if (!write_gradient) return;
  const float shift = others.top + log_total;
  for (int c = static_cast<int>(threadIdx.x) * kVec; c < width; c += kThreads * kVec) {
    float v[kVec];
    load(x + c, v);
#pragma unroll
    for (int i = 0; i < kVec; ++i) v[i] = c + i == label ? -others.sum / total : expf(v[i] - shift);  // p - 1, p
    store(x + c, v);
  }
}

}  // namespace

void cross_entropy(Element element, void* logits, const std::int64_t* labels, double* loss, std::int64_t* correct,
                   bool write_gradient, std::int64_t rows, std::int64_t width, Stream stream) {
  if (rows == 0) return;
  for_element(element, width, aligned(logits), [&](auto t, auto vec) {
    using T = decltype(t);
    start(cross_entropy_kernel<T, decltype(vec)::value>, static_cast<unsigned>(rows), kThreads, stream,
          static_cast<T*>(logits), labels, loss, correct, write_gradient, static_cast<int>(width));
  });
}

}  // namespace cram::kernels::cuda::launch
