#include "train/adamw.h"

#include "model/kernels/kernels.h"

namespace cram {
namespace {

class AdamW final : public UpdateRule {
 public:
  explicit AdamW(const OptimizerSettings& settings) : settings_(settings) {}

  // One fused call for all pieces.
  void update(const std::vector<UpdatePiece>& pieces, const Update& update) override {
    std::vector<kernels::AdamWPiece> all;
    for (const UpdatePiece& piece : pieces) {
      all.push_back({piece.master,
                     piece.grad,
                     piece.states[0],
                     piece.states[1],
                     piece.working,
                     {.lr = update.lr * piece.traits->lr_factor,
                      .beta1 = settings_.beta1,
                      .beta2 = settings_.beta2,
                      .eps = settings_.eps,
                      .weight_decay = piece.traits->decay ? settings_.weight_decay : 0,
                      .grad_scale = update.grad_scale,
                      .step = update.number}});
    }
    kernels::adamw_(all);
  }

 private:
  OptimizerSettings settings_;
};

}  // namespace

OptimizerRow adamw_row() {
  return {.name = "adamw",
          .states = [](const ParamClass&) -> std::vector<std::string> {
            return {"exp_avg", "exp_avg_sq"};
          },
          .make = [](const OptimizerContext& context) -> std::unique_ptr<UpdateRule> {
            return std::make_unique<AdamW>(context.settings);
          }};
}

}  // namespace cram
