// Gradient norm, clipping and the update of the parameter store's flat buffers by the optimizer of train.optimizer.
//
// An optimizer is one file and one row of the table: it names its states, may ask for whole matrices, and updates what
// a rank owns.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/table.h"
#include "model/parameter_store.h"
#include "parallel/mesh.h"

namespace cram {

struct OptimizerSettings {
  double beta1 = 0.9;
  double beta2 = 0.98;
  double eps = 1e-12;
  double weight_decay = 0.01;
};

/// One update: its number (from 1, for bias corrections), the schedule's learning rate, and what the summed gradients
/// are multiplied by.
struct Update {
  std::int64_t number = 1;
  double lr = 0;
  double grad_scale = 1;
};

/// What this rank updates of a flat buffer: 1-d tensors of one size. Of a class that needs whole matrices a piece is a
/// run of whole parameters, which `parameters` names.
struct UpdatePiece {
  const ParamClass* traits = nullptr;
  at::Tensor master, grad;         ///< the update clears the gradient
  at::Tensor working;              ///< receives the new master in its own format; undefined: the master itself is used
  std::vector<at::Tensor> states;  ///< in the order of the row's names
  std::vector<ParamId> parameters = {};
};

class UpdateRule {
 public:
  virtual ~UpdateRule() = default;
  /// All pieces of a rank; some ranks may have none. Collective over the groups that the rule itself uses.
  virtual void update(const std::vector<UpdatePiece>& pieces, const Update& update) = 0;
};

/// What a rule may look at; all outlive it.
struct OptimizerContext {
  const OptimizerSettings& settings;
  const ParameterStore& store;
  const Mesh& mesh;
};

struct OptimizerRow {
  std::string name;
  /// See StateLayout.
  std::vector<std::string> (*states)(const ParamClass&);
  void (*classify)(const ParamSpec&, ParamClass&) = nullptr;
  std::unique_ptr<UpdateRule> (*make)(const OptimizerContext&);
};

/// The legal values of train.optimizer.
[[nodiscard]] Table<OptimizerRow>& optimizers();

/// What ParameterStore::allocate makes for that optimizer. Throws Error(kUsage) naming the known ones.
[[nodiscard]] StateLayout state_layout(const std::string& optimizer);

/// min(1, clip/(norm + 1e-6)); 1 when clip is 0.
[[nodiscard]] double clip_factor(double norm, double clip);

class Optimizer {
 public:
  /// Store (allocated for that optimizer) and mesh must outlive it.
  Optimizer(const std::string& name, ParameterStore& store, const OptimizerSettings& settings, const Mesh& mesh);

  /// This rank's part of the squared L2 norm of the whole model's reduced gradients as they are (of the loss sum),
  /// fp64, in a fixed order for any thread count. Summed over the world every parameter counts once, whether it is
  /// sharded over tensor ranks, shared out over data ranks, on another stage or held by several.
  [[nodiscard]] double own_sum_of_squares() const;

  /// Updates the weights and clears the gradients. Where the state is shared out, every rank updates its part and the
  /// working weights are gathered over the data ranks.
  void update(const Update& update);

 private:
  ParameterStore& store_;
  OptimizerSettings settings_;
  const Mesh& mesh_;
  std::unique_ptr<UpdateRule> rule_;
};

}  // namespace cram
