#include "train/optimizer.h"

#include <torch/types.h>

#include <algorithm>
#include <cmath>

#include "base/profile.h"
#include "model/kernels/kernels.h"
#include "train/adamw.h"

namespace cram {
namespace {

// Adds what this rank updates of a buffer.
void add_owned_pieces(const ParameterStore& store, std::size_t index, std::vector<UpdatePiece>& pieces) {
  const FlatBuffers& b = store.buffers()[index];
  for (const OwnedPart& part : b.parts) {
    if (part.numel() == 0) continue;
    const auto own = [&](const at::Tensor& flat) { return flat.narrow(0, part.at, part.numel()); };
    const at::Tensor working =
        b.working.is_same(b.master) ? at::Tensor() : b.working.narrow(0, part.begin, part.numel());
    UpdatePiece piece{&b.traits, own(b.master), own(b.owned_grad), working, {}};
    for (const NamedTensor& state : b.states) piece.states.push_back(own(state.tensor));
    if (b.traits.whole_matrices) {
      for (ParamId id = 0; id < store.size(); ++id) {
        const ParameterStore::Location where = store.location(id);
        if (where.buffer == index && where.begin >= part.begin && where.end <= part.end) piece.parameters.push_back(id);
      }
    }
    pieces.push_back(std::move(piece));
  }
}

}  // namespace

Table<OptimizerRow>& optimizers() {
  static Table<OptimizerRow> table("optimizer", {adamw_row()});
  return table;
}

StateLayout state_layout(const std::string& optimizer) {
  const OptimizerRow& row = optimizers().at(optimizer);
  StateLayout layout{.states = row.states};
  if (row.classify != nullptr) layout.classify = row.classify;
  return layout;
}

double clip_factor(double norm, double clip) { return clip <= 0 ? 1.0 : std::min(1.0, clip / (norm + 1e-6)); }

Optimizer::Optimizer(const std::string& name, ParameterStore& store, const OptimizerSettings& settings,
                     const Mesh& mesh)
    : store_(store), settings_(settings), mesh_(mesh), rule_(optimizers().at(name).make({settings_, store_, mesh_})) {}

double Optimizer::own_sum_of_squares() const {
  const Timed timed(Section::kOptimizer);
  const MeshCoordinates& place = mesh_.place();
  at::Tensor own;  // stays on the device until all are added: one synchronisation
  for (const FlatBuffers& b : store_.buffers()) {
    // Of several ranks that hold the same values one adds them.
    const bool adds = b.traits.counts && (b.traits.sharded || place.tp_rank == 0) &&
                      (b.shared_out || place.dp_rank == 0) && b.owned_grad.numel() > 0;
    if (!adds) continue;
    const at::Tensor sum = kernels::sum_of_squares(b.owned_grad);
    own = own.defined() ? own.add_(sum) : sum;
  }
  return own.defined() ? own.item<double>() : 0;
}

void Optimizer::update(const Update& update) {
  const Timed timed(Section::kOptimizer);
  std::vector<UpdatePiece> pieces;
  for (std::size_t index = 0; index < store_.buffers().size(); ++index) add_owned_pieces(store_, index, pieces);
  rule_->update(pieces, update);
  for (const FlatBuffers& b : store_.buffers()) {
    if (b.shared_out) b.grad.zero_();  // the update cleared the owned sums only
  }
  store_.gather_working(mesh_.data());
}

}  // namespace cram
