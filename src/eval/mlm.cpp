#include "eval/mlm.h"

#include <torch/types.h>

#include <algorithm>

#include "data/loader.h"

namespace cram {

EvalRecord evaluate_mlm(Encoder& encoder, at::Device device, ShardSet& validation, const MlmEvalSettings& settings) {
  const MaskSettings masks{.seed = 0,
                           .vocab_size = validation.vocab_size(),
                           .seq_length = validation.seq_length(),
                           .mask_rate = settings.mask_rate};
  const std::int64_t rows = std::min(settings.rows, validation.rows());
  double loss_sum = 0;
  std::int64_t correct = 0;
  EvalRecord record;
  for (std::int64_t first = 0; first < rows; first += settings.micro_batch) {
    const Batch batch = make_batch(validation, first, std::min(settings.micro_batch, rows - first), masks);
    const Encoder::Evaluation result =
        encoder.evaluate(batch.ids.to(device), batch.positions.to(device), batch.labels.to(device));
    loss_sum += result.loss_sum.item<double>();
    correct += result.correct.item<std::int64_t>();
    record.masked += batch.labels.numel();
  }
  record.loss = loss_sum / static_cast<double>(record.masked);
  record.accuracy = static_cast<double>(correct) / static_cast<double>(record.masked);
  return record;
}

}  // namespace cram
