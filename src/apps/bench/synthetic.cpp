#include "apps/bench/synthetic.h"

#include "base/check.h"

namespace cram {

void prepare_synthetic(Config& config, const Layout& layout) {
  if (config.model.vocab_size == 0) config.model.vocab_size = 32768;
  if (config.model.seq_length == 0) config.model.seq_length = 128;
  config.train.batch_ramp = 0;
  CRAM_CHECK(config.train.micro_batch_size > 0, ExitCode::kUsage,
             "train.micro_batch_size=auto is for cram_train; a measurement needs a number");
  if (config.train.batch_size == TrainConfig().batch_size) {
    // The recipe's batch would take minutes a step on a CPU: four micro-batches show the same.
    config.train.batch_size =
        4 * layout.data * config.train.micro_batch_size * (config.parallel.virtual_stages > 1 ? layout.pipeline : 1);
  }
  resolve_train_config(config, layout);
  check_model_config(config.model);
  CRAM_CHECK(masked_in_row(config) > 0, ExitCode::kUsage, "train.mask_rate=", config.train.mask_rate,
             " masks no token of a row of model.seq_length=", config.model.seq_length,
             "; a step would predict nothing");
}

}  // namespace cram
