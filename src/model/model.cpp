#include "model/model.h"

#include <torch/types.h>

namespace cram {

Model::Model(const ModelConfig& config, ParameterStore& store, const Placement& placement, const std::string& objective)
    : encoder_(std::make_unique<Encoder>(config, store, placement)) {
  const ObjectiveRow& row = objectives().at(objective);
  own_first_ = own_end_ = store.size();
  if (!encoder_->has_last_block()) return;
  objective_ = row.make({config, store, placement.tensor, encoder_->word_embedding()});
  own_end_ = store.size();
}

Model::Model(const ModelConfig& config, ParameterStore& store, const std::string& objective)
    : Model(config, store, make_self_communicator(), objective) {}

Model::Model(const ModelConfig& config, ParameterStore& store, std::unique_ptr<Communicator> alone,
             const std::string& objective)
    : Model(config, store, Placement{*alone}, objective) {
  alone_ = std::move(alone);
}

MicroBatch Model::micro_batch(Batch fields, const DropoutSource& dropout) const {
  at::Tensor picks = has_objective() ? objective_->rows(fields) : at::Tensor();
  return {std::move(fields), std::move(picks), dropout};
}

at::Tensor Model::forward(int block, const MicroBatch& batch, const at::Tensor& x, BlockSaved& saved) {
  at::Tensor y = encoder_->forward_block(block, batch, x, &saved.trunk);
  if (block + 1 < encoder_->blocks()) return y;
  saved.loss_sum = objective_->forward(y, batch.fields, saved.objective);
  return {};
}

at::Tensor Model::backward(int block, const MicroBatch& batch, const at::Tensor& dy, BlockSaved& saved,
                           const Encoder::GradientsComplete& complete) {
  const bool last = block + 1 == encoder_->blocks();
  const at::Tensor d_output = last ? objective_->backward(batch.fields, saved.objective) : dy;
  if (last && complete && own_end_ > own_first_) complete(own_first_, own_end_);
  return encoder_->backward_block(block, batch, d_output, saved.trunk, complete);
}

std::set<std::string> parameter_names(const ModelConfig& config, const std::string& objective) {
  ParameterStore store;
  const Model whole(config, store, objective);
  std::set<std::string> names;
  for (ParamId id = 0; id < store.size(); ++id) names.insert(store.spec(id).name);
  return names;
}

std::int64_t parameter_count(const ModelConfig& config, const std::string& objective) {
  ParameterStore store;
  const Model whole(config, store, objective);
  std::int64_t count = 0;
  for (ParamId id = 0; id < store.size(); ++id) count += store.local_numel(id);
  return count;
}

}  // namespace cram
