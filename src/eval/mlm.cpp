#include "eval/mlm.h"

#include <torch/types.h>

#include <algorithm>

#include "data/loader.h"
#include "train/forward_pass.h"
#include "train/shared_rows.h"

namespace cram {

EvalRecord evaluate_mlm(Model& model, const ParameterStore& store, ShardSet& validation,
                        const MlmEvalSettings& settings, const Mesh& mesh) {
  const MaskSettings masks{.seed = 0,
                           .vocab_size = validation.vocab_size(),
                           .seq_length = validation.seq_length(),
                           .mask_rate = settings.mask_rate};
  const std::int64_t rows = std::min(settings.rows, validation.rows());
  const at::Tensor totals = at::zeros({3}, at::kDouble);  // loss sum, correct, masked
  ForwardPass pass(model, store, mesh.pipeline());
  const std::int64_t stride = settings.micro_batch * mesh.layout().data;
  for (std::int64_t first = settings.micro_batch * mesh.place().dp_rank; first < rows; first += stride) {
    const Batch batch = read_shared_batch(validation, first, std::min(settings.micro_batch, rows - first), masks, mesh);
    const Objective::Evaluation result = pass.evaluate(batch);
    if (!mesh.is_last_stage()) continue;
    totals.add_(at::tensor({result.loss_sum.item<double>(), static_cast<double>(result.correct.item<std::int64_t>()),
                            static_cast<double>(batch[field::kLabels].numel())},
                           at::kDouble));
  }
  // Sums of the last stage are equal on its tensor ranks: one of them adds.
  if (mesh.place().tp_rank != 0) totals.zero_();
  mesh.world().all_reduce_(totals);
  const double masked = totals[2].item<double>();
  EvalRecord record;
  record.masked = static_cast<std::int64_t>(masked);
  record.loss = totals[0].item<double>() / masked;
  record.accuracy = totals[1].item<double>() / masked;
  return record;
}

}  // namespace cram
