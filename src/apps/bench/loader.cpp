// The data path alone: reading, masking and handing over micro-batches, as training does it.
#include <torch/types.h>

#include "apps/bench/bench.h"
#include "base/clock.h"
#include "base/log.h"
#include "data/loader.h"

namespace cram {

BenchResult bench_loader(BenchContext& context) {
  const Config& config = context.config;
  const auto shards = std::make_shared<ShardSet>(ShardSet::open(config.data.shards, "train"));
  BenchResult result;
  for (const int prefetch : {0, 4}) {
    LoaderSettings settings;
    settings.micro_batch = config.train.micro_batch_size;
    settings.mask_rate = config.train.mask_rate;
    settings.shuffle = config.data.shuffle;
    settings.prefetch = prefetch;
    Loader loader(shards, settings, 0);
    (void)loader.next();  // digests of the first shard
    std::int64_t rows = 0;
    const double from_s = steady_now_s();
    while (steady_now_s() - from_s < 3) rows += loader.next().rows;
    const double rows_per_s = static_cast<double>(rows) / (steady_now_s() - from_s);
    say("  prefetch ", prefetch, ": ", static_cast<std::int64_t>(rows_per_s), " rows/s, ",
        static_cast<std::int64_t>(rows_per_s * static_cast<double>(shards->seq_length())), " tokens/s");
    result.add(concat("rows_per_s_prefetch", prefetch), rows_per_s);
  }
  return result;
}

}  // namespace cram
