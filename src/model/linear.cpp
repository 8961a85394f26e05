#include "model/linear.h"

#include <torch/types.h>

#include "base/check.h"

namespace cram {
namespace {

class DenseLinear final : public Linear {
 public:
  DenseLinear(const LinearSpec& spec, ParameterStore& store)
      : store_(store),
        weight_(store.add({.name = spec.name + ".weight",
                           .global_shape = {spec.out, spec.in},
                           .init = InitRule::kNormal,
                           .init_value = spec.init_stddev,
                           .decay = true,
                           .fan_in = spec.in})) {}

  at::Tensor forward(const at::Tensor& x) const override { return at::mm(x, store_.weight(weight_).t()); }

  at::Tensor backward(const at::Tensor& dy, const at::Tensor& x) const override {
    accumulate_weight_grad(store_.grad(weight_), dy, x);
    return at::mm(dy, store_.weight(weight_));
  }

  at::Tensor materialize() const override { return store_.weight(weight_); }

 private:
  const ParameterStore& store_;
  ParamId weight_;
};

struct TableRow {
  const char* structure;
  const char* tp_style;
  std::unique_ptr<Linear> (*make)(const LinearSpec&, ParameterStore&);
};

constexpr TableRow kLinearTable[] = {
    {"dense", "replicated",
     [](const LinearSpec& spec, ParameterStore& store) -> std::unique_ptr<Linear> {
       return std::make_unique<DenseLinear>(spec, store);
     }},
};

}  // namespace

std::unique_ptr<Linear> make_linear(const std::string& structure, const std::string& tp_style, const LinearSpec& spec,
                                    ParameterStore& store) {
  std::string supported;
  for (const TableRow& row : kLinearTable) {
    if (structure == row.structure && tp_style == row.tp_style) return row.make(spec, store);
    supported += concat(supported.empty() ? "" : ", ", row.structure, "/", row.tp_style);
  }
  fail(ExitCode::kUsage, "linear structure ", structure, " with tensor-parallel style ", tp_style,
       " is not supported; supported: ", supported);
}

void accumulate_weight_grad(const at::Tensor& grad, const at::Tensor& dy, const at::Tensor& x) {
  if (grad.scalar_type() == x.scalar_type()) {
    at::Tensor target = grad;
    at::addmm_out(target, grad, dy.t(), x);
  } else {
    grad.add_(at::mm(dy.t(), x));  // bf16 product, fp32 sum
  }
}

}  // namespace cram
