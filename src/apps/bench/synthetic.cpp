#include "apps/bench/synthetic.h"

#include "base/check.h"

namespace cram {

RunDescription resolve_synthetic(const BenchContext& context, const Layout& layout) {
  Config config = context.config;
  config.train.batch_ramp = 0;
  CRAM_CHECK(config.train.micro_batch_size > 0, ExitCode::kUsage,
             "train.micro_batch_size=auto is for cram_train; a measurement needs a number");
  if (config.train.batch_size == TrainConfig().batch_size) {
    // The recipe's batch would take minutes a step on a CPU: four micro-batches show the same.
    config.train.batch_size =
        4 * layout.data * config.train.micro_batch_size * (config.parallel.virtual_stages > 1 ? layout.pipeline : 1);
  }
  const DataShape shape{config.model.vocab_size > 0 ? config.model.vocab_size : 32768,
                        config.model.seq_length > 0 ? config.model.seq_length : 128, "", ""};
  RunDescription run = resolve_run(config, layout, shape, machine_place(context.launch), context.world);
  use_device(run.device);
  return run;
}

}  // namespace cram
