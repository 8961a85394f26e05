// Linear layers behind one table of structures (model.structure): a structure is one file and one row; so far: dense.
//
// Tensor-parallel styles (Shoeybi et al. 2019, section 3): "column" cuts the output, so forward needs nothing and the
// input gradient is summed over the group; "row" cuts the input, so the output is summed and backward needs nothing. A
// column layer followed by a row layer costs one all-reduce each way. In a group of one they are the plain layer.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>

#include "base/table.h"
#include "model/kernels/panels.h"
#include "model/parameter_store.h"
#include "parallel/regions.h"

namespace cram {

struct LinearSpec {
  std::string name;  ///< parameter name without ".weight"
  std::int64_t in = 0;
  std::int64_t out = 0;
  double init_stddev = 0.02;
  std::int64_t output_groups = 1;  ///< column: equal parts of the output that are cut separately (2 for a gated FFN)
};

/// y = x W^T without bias, W [out,in]. "column": x is whole (or rows shared out) and y this rank's columns; "row": the
/// other way round. The structure places its own collectives.
class Linear {
 public:
  /// What the backward pass needs; a structure keeps what it uses.
  struct Saved {
    at::Tensor x;                  // [N,in] as it was multiplied
    std::vector<at::Tensor> more;  // whatever else
  };
  virtual ~Linear() = default;
  Linear(const Linear&) = delete;
  Linear& operator=(const Linear&) = delete;

  /// x [N,in] -> [N,out]; fills `saved` when given (training).
  [[nodiscard]] virtual at::Tensor forward(const at::Tensor& x, Saved* saved) const = 0;
  /// dy [N,out] -> dx [N,in]; adds to the weight's gradient.
  [[nodiscard]] virtual at::Tensor backward(const at::Tensor& dy, const Saved& saved) const = 0;
  /// This rank's weight as one matrix, for tests of structures.
  [[nodiscard]] virtual at::Tensor materialize() const = 0;

 protected:
  Linear() = default;
};

/// How a structure makes its layers and registers their parameters; the group must outlive them. A style that it has
/// not is null. Throws Error(kUsage) when the group does not divide the cut dimension.
struct LinearStructure {
  using Make = std::unique_ptr<Linear> (*)(const LinearSpec&, ParameterStore&, const TensorRegion&);
  std::string name;
  Make replicated = nullptr, column = nullptr, row = nullptr;
  /// FLOPs of a whole layer's products, forward, for one row of x; null: those of a dense one, 2*in*out.
  double (*flops)(const LinearSpec&) = nullptr;
};

/// The legal values of model.structure.
[[nodiscard]] Table<LinearStructure>& linear_structures();

/// By the structure's row.
[[nodiscard]] double linear_flops(const std::string& structure, const LinearSpec& spec);

enum class LinearStyle { kReplicated, kColumn, kRow };

/// The structure's layer of that style. Throws Error(kUsage) naming what there is.
[[nodiscard]] std::unique_ptr<Linear> make_linear(const std::string& structure, LinearStyle style,
                                                  const LinearSpec& spec, ParameterStore& store,
                                                  const TensorRegion& tensor);

/// y [N,out] = x W^T, and dx [N,in] = dy W, of a weight [out,in].
[[nodiscard]] at::Tensor matmul(const at::Tensor& x, const at::Tensor& weight, kernels::WeightPanels& panels);
[[nodiscard]] at::Tensor matmul_backward(const at::Tensor& dy, const at::Tensor& weight, kernels::WeightPanels& panels);
/// grad += dy^T x: the weight gradient of y = x W^T, accumulated in the gradient's own format.
void accumulate_weight_grad(const at::Tensor& grad, const at::Tensor& dy, const at::Tensor& x);

}  // namespace cram
