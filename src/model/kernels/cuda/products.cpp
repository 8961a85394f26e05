// Matrix products by cuBLASLt: bf16 or fp32 operands, fp32 sums, and the weight gradient added to the fp32 gradient
// where it lies. Descriptors and the algorithm are looked up once for each shape.
#include <ATen/Context.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/Exceptions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <cublasLt.h>
#include <torch/types.h>

#include <algorithm>
#include <compare>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "model/kernels/backend.h"
#include "model/kernels/cuda/backend.h"

namespace cram::kernels::cuda {
namespace {

// D [m,n] = op(A) op(B) (+ D) of column-major matrices; our row-major ones are their transposes, with leading dimension
// their row length.
struct Problem {
  bool transpose_a = false, transpose_b = false;
  std::int64_t m = 0, n = 0, k = 0;
  std::int64_t lda = 0, ldb = 0, ldd = 0;
  cudaDataType_t operand = CUDA_R_16BF, result = CUDA_R_16BF;
  cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
  bool accumulate = false;
  std::uint32_t align_a = 16, align_b = 16, align_d = 16;  // bytes
  std::size_t workspace_bytes = 0;
  int device = 0;
  auto operator<=>(const Problem&) const = default;
};

struct Destroy {
  void operator()(cublasLtMatmulDescOpaque_t* p) const { cublasLtMatmulDescDestroy(p); }
  void operator()(cublasLtMatrixLayoutOpaque_t* p) const { cublasLtMatrixLayoutDestroy(p); }
  void operator()(cublasLtMatmulPreferenceOpaque_t* p) const { cublasLtMatmulPreferenceDestroy(p); }
};
template <class T>
using Owned = std::unique_ptr<T, Destroy>;

struct Recipe {
  Owned<cublasLtMatmulDescOpaque_t> operation;
  Owned<cublasLtMatrixLayoutOpaque_t> a, b, d;
  cublasLtMatmulAlgo_t algorithm{};
  bool found = false;
};

Owned<cublasLtMatrixLayoutOpaque_t> layout(cudaDataType_t type, std::int64_t rows, std::int64_t columns,
                                           std::int64_t ld) {
  cublasLtMatrixLayout_t made = nullptr;
  TORCH_CUDABLAS_CHECK(cublasLtMatrixLayoutCreate(&made, type, static_cast<std::uint64_t>(rows),
                                                  static_cast<std::uint64_t>(columns), ld));
  return Owned<cublasLtMatrixLayoutOpaque_t>(made);
}

template <class Value>
void set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, const Value& value) {
  TORCH_CUDABLAS_CHECK(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof value));
}
template <class Value>
void set(cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t attribute, const Value& value) {
  TORCH_CUDABLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value));
}

Recipe make_recipe(cublasLtHandle_t handle, const Problem& p) {
  Recipe recipe;
  cublasLtMatmulDesc_t operation = nullptr;
  TORCH_CUDABLAS_CHECK(cublasLtMatmulDescCreate(&operation, p.compute, CUDA_R_32F));
  recipe.operation.reset(operation);
  set(operation, CUBLASLT_MATMUL_DESC_TRANSA, p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(operation, CUBLASLT_MATMUL_DESC_TRANSB, p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  recipe.a = layout(p.operand, p.transpose_a ? p.k : p.m, p.transpose_a ? p.m : p.k, p.lda);
  recipe.b = layout(p.operand, p.transpose_b ? p.n : p.k, p.transpose_b ? p.k : p.n, p.ldb);
  recipe.d = layout(p.result, p.m, p.n, p.ldd);
  cublasLtMatmulPreference_t made = nullptr;
  TORCH_CUDABLAS_CHECK(cublasLtMatmulPreferenceCreate(&made));
  const Owned<cublasLtMatmulPreferenceOpaque_t> preference(made);
  set(made, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, p.workspace_bytes);
  // Parts of a long sum are added in fp32, never in the format of the result.
  set(made, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<std::uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  set(made, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, p.align_a);
  set(made, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, p.align_b);
  set(made, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, p.align_d);
  set(made, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, p.align_d);
  cublasLtMatmulHeuristicResult_t result{};
  int found = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(handle, operation, recipe.a.get(), recipe.b.get(), recipe.d.get(), recipe.d.get(),
                                     made, /*requestedAlgoCount=*/1, &result, &found);
  recipe.found = status == CUBLAS_STATUS_SUCCESS && found > 0;
  recipe.algorithm = result.algo;
  return recipe;
}

// Recipes live as long as the process: a destructor at its end would come after the driver's.
const Recipe& recipe_for(cublasLtHandle_t handle, const Problem& p) {
  static std::mutex mutex;
  static auto& recipes = *new std::map<Problem, Recipe>();
  const std::lock_guard lock(mutex);
  const auto found = recipes.find(p);
  if (found != recipes.end()) return found->second;
  return recipes.emplace(p, make_recipe(handle, p)).first->second;
}

// Scratch memory of products, taken from the caching allocator on a stream's first one and kept: products of a stream
// run one after the other. As long as recipes, for the same reason.
at::Tensor workspace_of(const at::Tensor& d, const c10::cuda::CUDAStream& stream) {
  static std::mutex mutex;
  static auto& workspaces = *new std::map<std::pair<int, cudaStream_t>, at::Tensor>();
  const std::int64_t bytes = std::int64_t{at::cuda::getCurrentDeviceProperties()->major >= 9 ? 32 : 8} << 20;
  const auto take = [&] { return at::empty({bytes}, d.options().dtype(at::kByte)); };
  const std::pair<int, cudaStream_t> key{stream.device_index(), stream.stream()};
  const std::lock_guard lock(mutex);
  const auto found = workspaces.find(key);
  if (found != workspaces.end()) return found->second;
  // What is taken while a graph is captured is the graph's; this stream's first product comes before, in a warm-up.
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) return take();
  return workspaces.emplace(key, take()).first->second;
}

// Bytes that an address is a multiple of, at most 256.
std::uint32_t alignment_of(const void* address) {
  const auto bits = reinterpret_cast<std::uintptr_t>(address) | 256U;
  return static_cast<std::uint32_t>(bits & (~bits + 1));
}

cudaDataType_t type_of(const at::Tensor& x) { return x.scalar_type() == at::kBFloat16 ? CUDA_R_16BF : CUDA_R_32F; }

// False where cuBLASLt knows no algorithm for this shape; nothing was done then.
bool multiply(Problem p, const at::Tensor& a, const at::Tensor& b, const at::Tensor& d) {
  if (p.m == 0 || p.n == 0 || p.k == 0) return false;
  const c10::cuda::CUDAGuard guard(d.device());
  p.operand = type_of(a);
  p.result = type_of(d);
  if (p.operand == CUDA_R_32F && at::globalContext().allowTF32CuBLAS()) p.compute = CUBLAS_COMPUTE_32F_FAST_TF32;
  p.align_a = alignment_of(a.const_data_ptr());
  p.align_b = alignment_of(b.const_data_ptr());
  p.align_d = alignment_of(d.const_data_ptr());
  p.device = d.device().index();
  const cublasLtHandle_t handle = at::cuda::getCurrentCUDABlasLtHandle();
  const c10::cuda::CUDAStream stream = at::cuda::getCurrentCUDAStream();
  const at::Tensor workspace = workspace_of(d, stream);
  p.workspace_bytes = workspace.nbytes();
  const Recipe& recipe = recipe_for(handle, p);
  if (!recipe.found) return false;
  const float alpha = 1, beta = p.accumulate ? 1 : 0;
  TORCH_CUDABLAS_CHECK(cublasLtMatmul(handle, recipe.operation.get(), &alpha, a.const_data_ptr(), recipe.a.get(),
                                      b.const_data_ptr(), recipe.b.get(), &beta, d.const_data_ptr(), recipe.d.get(),
                                      d.data_ptr(), recipe.d.get(), &recipe.algorithm, workspace.data_ptr(),
                                      p.workspace_bytes, stream.stream()));
  return true;
}

bool match(const at::Tensor& x, const at::Tensor& y) { return takes(y) && x.scalar_type() == y.scalar_type(); }

}  // namespace

// y' [out,N] = W x', where a row-major matrix is its own transpose by columns: A = W' transposed, B = x'.
at::Tensor product_transposed(const at::Tensor& x, const at::Tensor& weight, WeightPanels& panels) {
  const std::int64_t rows = x.size(0), in = x.size(1), out = weight.size(0);
  if (match(x, weight)) {
    const at::Tensor y = at::empty({rows, out}, x.options());
    if (multiply({.transpose_a = true, .m = out, .n = rows, .k = in, .lda = in, .ldb = in, .ldd = out}, weight, x, y)) {
      return y;
    }
  }
  return composed::product_transposed(x, weight, panels);
}

// dx' [in,N] = W' dy'
at::Tensor product(const at::Tensor& dy, const at::Tensor& weight, WeightPanels& panels) {
  const std::int64_t rows = dy.size(0), out = dy.size(1), in = weight.size(1);
  if (match(dy, weight)) {
    const at::Tensor dx = at::empty({rows, in}, dy.options());
    if (multiply({.m = in, .n = rows, .k = out, .lda = in, .ldb = out, .ldd = in}, weight, dy, dx)) return dx;
  }
  return composed::product(dy, weight, panels);
}

// sum' [in,out] += x' dy
void add_transposed_product_(const at::Tensor& sum, const at::Tensor& dy, const at::Tensor& x) {
  const std::int64_t rows = dy.size(0), out = dy.size(1), in = x.size(1);
  const bool wide = sum.is_cuda() && sum.scalar_type() == at::kFloat && sum.is_contiguous();
  if (wide && match(dy, x) &&
      multiply(
          {.transpose_b = true, .m = in, .n = out, .k = rows, .lda = in, .ldb = out, .ldd = in, .accumulate = true}, x,
          dy, sum)) {
    return;
  }
  composed::add_transposed_product_(sum, dy, x);
}

}  // namespace cram::kernels::cuda
