#include "model/linear.h"

#include <torch/types.h>

#include "base/check.h"
#include "base/profile.h"
#include "model/kernels/kernels.h"

namespace cram {
namespace {

enum class Cut { kNone, kOutput, kInput };

ParamSpec dense_spec(const LinearSpec& spec, Cut cut, const TensorRegion& tensor) {
  ParamSpec param{.name = spec.name + ".weight",
                  .global_shape = {spec.out, spec.in},
                  .init = InitRule::kNormal,
                  .init_value = spec.init_stddev};
  if (cut == Cut::kNone) return param;
  param.slice_dim = cut == Cut::kOutput ? 0 : 1;
  param.slice_groups = cut == Cut::kOutput ? spec.output_groups : 1;
  const std::int64_t extent = (cut == Cut::kOutput ? spec.out : spec.in) / param.slice_groups;
  CRAM_CHECK(extent % tensor.size() == 0, ExitCode::kUsage, spec.name, ": ", extent, " columns cannot be cut for ",
             tensor.size(), " tensor ranks; parallel.tensor must divide them");
  param.slice_begin = extent / tensor.size() * tensor.rank();
  param.slice_end = param.slice_begin + extent / tensor.size();
  return param;
}

class DenseLinear final : public Linear {
 public:
  DenseLinear(const LinearSpec& spec, Cut cut, ParameterStore& store, const TensorRegion& tensor)
      : store_(store), cut_(cut), tensor_(tensor), weight_(store.add(dense_spec(spec, cut, tensor))) {}

  at::Tensor forward(const at::Tensor& x, Saved* saved) const override {
    const at::Tensor whole = cut_ == Cut::kOutput ? tensor_.enter(x) : x;
    if (saved != nullptr) saved->x = whole;
    const at::Tensor y = matmul(whole, store_.weight(weight_), panels_);
    return cut_ == Cut::kInput ? tensor_.leave_(y) : y;
  }

  at::Tensor backward(const at::Tensor& dy, const Saved& saved) const override {
    const at::Tensor whole = cut_ == Cut::kInput ? tensor_.leave_backward(dy) : dy;
    const at::Tensor dx = matmul_backward(whole, store_.weight(weight_), panels_);
    if (cut_ != Cut::kOutput) {
      accumulate_weight_grad(store_.grad(weight_), whole, saved.x);
      return dx;
    }
    PendingTensor sum = tensor_.enter_backward_(dx);  // hidden behind the weight gradient
    accumulate_weight_grad(store_.grad(weight_), whole, saved.x);
    return sum.wait();
  }

  at::Tensor materialize() const override { return store_.weight(weight_); }

 private:
  const ParameterStore& store_;
  Cut cut_;
  TensorRegion tensor_;
  ParamId weight_;
  mutable kernels::WeightPanels panels_;
};

template <Cut cut>
std::unique_ptr<Linear> make_dense(const LinearSpec& spec, ParameterStore& store, const TensorRegion& tensor) {
  return std::make_unique<DenseLinear>(spec, cut, store, tensor);
}

}  // namespace

Table<LinearStructure>& linear_structures() {
  static Table<LinearStructure> table(
      "linear structure", {{"dense", make_dense<Cut::kNone>, make_dense<Cut::kOutput>, make_dense<Cut::kInput>}});
  return table;
}

double linear_flops(const std::string& structure, const LinearSpec& spec) {
  const LinearStructure& row = linear_structures().at(structure);
  return row.flops != nullptr ? row.flops(spec) : 2 * static_cast<double>(spec.in) * static_cast<double>(spec.out);
}

std::unique_ptr<Linear> make_linear(const std::string& structure, LinearStyle style, const LinearSpec& spec,
                                    ParameterStore& store, const TensorRegion& tensor) {
  const LinearStructure& row = linear_structures().at(structure);
  const std::pair<LinearStructure::Make, const char*> made[] = {
      {row.replicated, "replicated"}, {row.column, "column"}, {row.row, "row"}};
  const auto& [make, style_name] = made[static_cast<int>(style)];
  std::string styles;
  for (const auto& [each, name] : made) styles += each == nullptr ? "" : concat(styles.empty() ? "" : ", ", name);
  CRAM_CHECK(make != nullptr, ExitCode::kUsage, "linear structure ", structure, " has no tensor-parallel style ",
             style_name, " (", spec.name, "); it has: ", styles);
  return make(spec, store, tensor);
}

at::Tensor matmul(const at::Tensor& x, const at::Tensor& weight, kernels::WeightPanels& panels) {
  const Timed timed(Section::kGemm);
  return kernels::product_transposed(x, weight, panels);
}

at::Tensor matmul_backward(const at::Tensor& dy, const at::Tensor& weight, kernels::WeightPanels& panels) {
  const Timed timed(Section::kGemm);
  return kernels::product(dy, weight, panels);
}

void accumulate_weight_grad(const at::Tensor& grad, const at::Tensor& dy, const at::Tensor& x) {
  const Timed timed(Section::kGemm);
  kernels::add_transposed_product_(grad, dy, x);
}

}  // namespace cram
