// Rows added to the rows of a table by id, without atomics: sorted positions are cut into pieces of fixed length; a run
// of equal ids inside of one piece is summed and added there, a longer one leaves its parts, which are added in order.
#include "model/kernels/cuda/device.cuh"

namespace cram::kernels::cuda::launch {
namespace {

constexpr int kPiece = 32;  // sorted positions of a block
constexpr int kThreads = 128;

__device__ bool counts(std::int64_t id, std::int64_t skip_id) { return id >= 0 && id != skip_id; }

// partial [pieces][2][width]: what a piece has of the run that began before it, and of the run that goes on after it
// (of one that does both, the first).
template <class T, int kVec>
__global__ void __launch_bounds__(kThreads)
    scatter_pieces_kernel(float* grad, const std::int32_t* ids, const std::int64_t* order, const T* d_rows,
                          float* partial, std::int64_t skip_id, std::int64_t rows, int width) {
  __shared__ std::int32_t id[kPiece];
  __shared__ std::int64_t from[kPiece];
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * kPiece;
  const int count = static_cast<int>(min(static_cast<std::int64_t>(kPiece), rows - begin));
  if (static_cast<int>(threadIdx.x) < count) {
    id[threadIdx.x] = ids[begin + threadIdx.x];
    from[threadIdx.x] = order[begin + threadIdx.x];
  }
  __syncthreads();
  const bool began_before = begin > 0 && ids[begin - 1] == id[0];
  const bool goes_on = begin + count < rows && ids[begin + count] == id[count - 1];
  float* first = partial + static_cast<std::int64_t>(blockIdx.x) * 2 * width;
  for (int c = static_cast<int>(threadIdx.x) * kVec; c < width; c += kThreads * kVec) {
    float sum[kVec] = {};
    int run_begin = 0;
    for (int i = 0; i < count; ++i) {
      if (counts(id[i], skip_id)) {
        float v[kVec];
        load(d_rows + from[i] * width + c, v);
#pragma unroll
        for (int k = 0; k < kVec; ++k) sum[k] += v[k];
      }
      const bool ends = i + 1 == count || id[i + 1] != id[i];
      if (!ends) continue;
      if (run_begin == 0 && began_before) {
        store(first + c, sum);
      } else if (i + 1 == count && goes_on) {
        store(first + width + c, sum);
      } else if (counts(id[i], skip_id)) {
        float* target = grad + id[i] * static_cast<std::int64_t>(width) + c;
        float g[kVec];
        load(target, g);
#pragma unroll
        for (int k = 0; k < kVec; ++k) g[k] += sum[k];
        store(target, g);
      }
      run_begin = i + 1;
#pragma unroll
      for (int k = 0; k < kVec; ++k) sum[k] = 0;
    }
  }
}

// The block of the piece where a long run begins adds all of its parts.
template <int kVec>
__global__ void __launch_bounds__(kThreads)
    scatter_long_runs_kernel(float* grad, const std::int32_t* ids, const float* partial, std::int64_t skip_id,
                             std::int64_t rows, int width) {
  const std::int64_t pieces = gridDim.x, piece = blockIdx.x;
  const std::int64_t end = (piece + 1) * kPiece;
  if (end >= rows) return;
  const std::int32_t id = ids[end - 1];
  if (ids[end] != id || !counts(id, skip_id)) return;
  // It began in an earlier piece: all of this one has the id, and so had the position before it.
  const std::int64_t begin = piece * kPiece;
  if (begin > 0 && ids[begin - 1] == id && ids[begin] == id) return;
  std::int64_t last = piece + 1;
  while (last < pieces && ids[last * kPiece] == id) ++last;
  for (int c = static_cast<int>(threadIdx.x) * kVec; c < width; c += kThreads * kVec) {
    float sum[kVec], v[kVec];
    load(partial + (piece * 2 + 1) * width + c, sum);
#pragma unroll 4
    for (std::int64_t p = piece + 1; p < last; ++p) {
      load(partial + p * 2 * width + c, v);
#pragma unroll
      for (int k = 0; k < kVec; ++k) sum[k] += v[k];
    }
    float* target = grad + id * static_cast<std::int64_t>(width) + c;
    load(target, v);
#pragma unroll
    for (int k = 0; k < kVec; ++k) sum[k] += v[k];
    store(target, sum);
  }
}

}  // namespace

std::int64_t scatter_partial_size(std::int64_t rows, std::int64_t width) { return divide_up(rows, kPiece) * 2 * width; }

void scatter_add_rows(Element element, float* grad, const std::int32_t* ids, const std::int64_t* order,
                      const void* d_rows, float* partial, std::int64_t skip_id, std::int64_t rows, std::int64_t width,
                      Stream stream) {
  if (rows == 0 || width == 0) return;
  const auto pieces = static_cast<unsigned>(divide_up(rows, kPiece));
  for_element(element, width, aligned(grad) && aligned(d_rows) && aligned(partial), [&](auto t, auto vec) {
    using T = decltype(t);
    constexpr int kVec = decltype(vec)::value;
    start(scatter_pieces_kernel<T, kVec>, pieces, kThreads, stream, grad, ids, order, static_cast<const T*>(d_rows),
          partial, skip_id, rows, static_cast<int>(width));
    start(scatter_long_runs_kernel<kVec>, pieces, kThreads, stream, grad, ids, partial, skip_id, rows,
          static_cast<int>(width));
  });
}

}  // namespace cram::kernels::cuda::launch
