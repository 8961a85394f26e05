#include "train/train_config.h"

#include <algorithm>

#include "data/masking.h"
#include "model/objective.h"
#include "run/budget_clock.h"
#include "train/optimizer.h"
#include "train/schedules.h"

namespace cram {
namespace {

// The nearest multiples of `unit` around `value`, for messages.
std::string nearest_multiples(std::int64_t value, std::int64_t unit) {
  const std::int64_t below = value / unit * unit;
  return below > 0 ? concat(below, " or ", below + unit) : concat(unit);
}

std::int64_t nearest_divisor(std::int64_t of, std::int64_t wanted) {
  std::int64_t best = 1;
  for (std::int64_t d = 1; d <= of; ++d) {
    if (of % d == 0 && std::abs(d - wanted) < std::abs(best - wanted)) best = d;
  }
  return best;
}

}  // namespace

void add_train_options(OptionTable& table, Config& config) {
  constexpr double kMany = 1e15;
  RunConfig& run = config.run;
  table.add("run.output", &run.output, "run folder; empty = runs/<hash of the settings>")
      .also_called({"output_dir", "out", "dir"})
      .free_on_resume();
  table.add("run.seed", &run.seed, "seed of initial weights, masks and shuffling").range(0, kMany);
  table.add("run.device", &run.device, "device").choices({"auto", "cpu", "cuda"}).free_on_resume();
  table.add("run.threads", &run.threads, "CPU threads; 0 = every processor this process may use")
      .range(0, 4096)
      .also_called({"num_threads", "cpus"})
      .free_on_resume();
  table.add("run.deterministic", &run.deterministic, "bitwise repeatable kernels on a GPU (the CPU always is)");
  table
      .add("run.cuda_graph", &run.cuda_graph,
           "record micro-steps on a GPU and replay them; auto = where it is possible, on = refuse where it is not")
      .choices({"auto", "on", "off"})
      .free_on_resume();
  table.add("run.stop_after", &run.stop_after, "save and stop at this point, schedule untouched; 0 = never")
      .units({"steps"})
      .free_on_resume();

  add_model_options(table, config.model);

  DataConfig& data = config.data;
  table.add("data.shards", &data.shards, "folder made by cram_data pack").also_called({"path", "dir"}).free_on_resume();
  table.add("data.shuffle", &data.shuffle, "permute the rows in every epoch; false keeps the prepared order");
  table.add("data.verify", &data.verify, "when shard digests are checked: before first use, or all at the start")
      .choices({"lazy", "full"})
      .free_on_resume();
  table.add("data.on_bad_shard", &data.on_bad_shard, "damaged shard: stop with exit code 22, or skip it whole")
      .choices({"stop", "skip"});

  TrainConfig& train = config.train;
  table.add("train.budget", &train.budget, "length of the run")
      .units({"steps", "tokens", "time"})
      .also_called({"steps", "max_steps", "duration", "time", "epochs"});
  table.add("train.clock", &train.clock, "what consumes the budget: auto, wall, steps, tokens, virtual:S, replay:FILE");
  table.add("train.batch_size", &train.batch_size, "rows of a batch, over all ranks").range(1, 1e9);
  table
      .add("train.micro_batch_size", &train.micro_batch_size,
           "rows of a micro-batch of one rank; auto = the fastest one, measured once and remembered")
      .range(1, 1e6)
      .word("auto", kAutoMicroBatch)
      .also_called({"micro_batch", "mbs"})
      .free_on_resume();
  table.add("train.batch_quantum", &train.batch_quantum, "rows by which the batch grows in the ramp").range(1, 1e9);
  table.add("train.batch_ramp", &train.batch_ramp, "fraction of the budget in which the batch grows; 0 = off")
      .range(0, 1);
  table.add("train.objective", &train.objective, "what the model is trained for")
      .choices(objectives().names())
      .added_later();
  table.add("train.optimizer", &train.optimizer, "how weights are updated").choices(optimizers().names()).added_later();
  table.add("train.lr", &train.lr, "peak learning rate").range(0, 1e3).also_called({"learning_rate", "lerning_rate"});
  table.add("train.schedule", &train.schedule, "shape of the learning rate over the budget")
      .choices(schedule_names())
      .also_called({"lr_schedule", "scheduler"});
  table.add("train.warmup", &train.warmup, "fraction of the budget with a linear warm-up").range(0, 0.99);
  table.add("train.peak_fraction", &train.peak_fraction, "part of the budget in which schedule ramp falls")
      .range(0.001, 0.999);
  table.add("train.weight_decay", &train.weight_decay, "decoupled weight decay; never on norms and biases").range(0, 1);
  table.add("train.beta1", &train.beta1, "Adam's first moment decay").range(0, 0.999999);
  table.add("train.beta2", &train.beta2, "Adam's second moment decay").range(0, 0.999999);
  table.add("train.eps", &train.eps, "Adam's epsilon").range(1e-300, 1);
  table.add("train.clip", &train.clip, "largest global gradient norm; 0 = no clipping").range(0, kMany);
  table.add("train.mask_rate", &train.mask_rate, "masked fraction of a row").range(0.001, 1);
  table.add("train.precision", &train.precision, "number format").choices({"auto", "bf16", "fp32", "fp64"});
  table
      .add("train.on_nonfinite", &train.on_nonfinite,
           "gradient with NaN or Inf: skip the step (5 in a row halt) or halt")
      .choices({"skip", "halt"});

  ParallelConfig& parallel = config.parallel;
  table.add("parallel.tensor", &parallel.tensor, "ranks that share every layer; data ranks are what is left")
      .range(1, 4096)
      .also_called({"tp", "tensor_parallel"})
      .free_on_resume();
  table.add("parallel.pipeline", &parallel.pipeline, "stages that share the layers")
      .range(1, 4096)
      .also_called({"pp", "pipeline_parallel"})
      .free_on_resume();
  table
      .add("parallel.virtual_stages", &parallel.virtual_stages,
           "blocks of layers a stage holds; above 1 the schedule is interleaved")
      .range(1, 4096)
      .free_on_resume();
  table.add("parallel.schedule", &parallel.schedule, "order of a pipeline's micro-batches; auto = 1f1b, interleaved")
      .choices({"auto", "1f1b", "gpipe"})
      .free_on_resume();
  table.add("parallel.split", &parallel.split, "layers of every block, as in 8,8,7,7; empty = balanced by their cost")
      .free_on_resume();
  table
      .add("parallel.sequence_parallel", &parallel.sequence_parallel,
           "tensor ranks share out the rows between tensor-parallel regions")
      .free_on_resume();
  table.add("parallel.zero", &parallel.zero, "1 = data ranks share out masters and moments (ZeRO-1)")
      .range(0, 1)
      .free_on_resume();
  table
      .add("parallel.overlap", &parallel.overlap,
           "exchange gradients while the last micro-batch is running; the result has the same bits")
      .free_on_resume();
  table
      .add("parallel.check_sync", &parallel.check_sync,
           "steps between two comparisons of what several ranks hold (exit code 31); 0 = never")
      .range(0, kMany)
      .free_on_resume();
  table
      .add("parallel.check_calls", &parallel.check_calls,
           "debugging: compare every collective call of the ranks before it runs")
      .free_on_resume();
  table
      .add("parallel.staging", &parallel.staging,
           "move a GPU's tensors by MPI through host memory instead of NCCL: several ranks can share a GPU")
      .free_on_resume();
  table
      .add("parallel.timeout", &parallel.timeout,
           "a rank that waits longer than this (and 5 median steps) for another ends the job (30)")
      .units({"time"})
      .free_on_resume();
  table
      .add("parallel.init_timeout", &parallel.init_timeout,
           "the same while starting, saving and evaluating, where one rank may work alone")
      .units({"time"})
      .free_on_resume();

  EvalConfig& eval = config.eval;
  table.add("eval.every", &eval.every, "interval of held-out evaluation; 0 = only at the end")
      .units({"steps", "tokens", "time"})
      .free_on_resume();
  table.add("eval.rows", &eval.rows, "held-out rows evaluated, at most").range(1, 1e9).free_on_resume();
  table.add("checkpoint.every", &config.checkpoint.every, "interval of checkpoints; 0 = only at the end")
      .units({"steps", "tokens", "time"})
      .free_on_resume();
  table.add("checkpoint.keep", &config.checkpoint.keep, "newest checkpoints kept").range(1, 1e6).free_on_resume();
  table
      .add("checkpoint.max_failures", &config.checkpoint.max_failures,
           "failed saves in a row before the run stops (21)")
      .range(1, 1e6)
      .free_on_resume();
  table.add("log.every", &config.log.every, "interval of progress lines")
      .units({"steps", "tokens", "time"})
      .free_on_resume();
}

Config resolve_train_config(const Config& given, const Layout& layout) {
  constexpr ExitCode kBad = ExitCode::kUsage;
  Config config = given;
  TrainConfig& t = config.train;
  CRAM_CHECK(t.budget.value > 0, kBad, "train.budget=", t.budget.text(), " must be positive");
  if (t.clock == "auto") t.clock = t.budget.is_time() ? "wall" : t.budget.unit;
  check_clock(t.budget, t.clock);
  CRAM_CHECK(t.schedule != "inverse-sqrt" || t.warmup > 0, kBad,
             "train.schedule=inverse-sqrt is sqrt(warmup/t) and needs train.warmup > 0, for example 0.05");
  if (t.batch_ramp == 0) t.batch_quantum = t.batch_size;
  CRAM_CHECK(t.batch_size % t.batch_quantum == 0, kBad, "train.batch_size=", t.batch_size,
             " is not a multiple of train.batch_quantum=", t.batch_quantum,
             "; nearest: ", nearest_multiples(t.batch_size, t.batch_quantum));
  const ParallelConfig& parallel = config.parallel;
  CRAM_CHECK(parallel.virtual_stages == 1 || layout.pipeline > 1, kBad,
             "parallel.virtual_stages=", parallel.virtual_stages, " needs parallel.pipeline of at least 2, got ",
             layout.pipeline);
  CRAM_CHECK(parallel.virtual_stages == 1 || parallel.schedule == "auto", kBad, "parallel.schedule=", parallel.schedule,
             " has one block a stage; parallel.virtual_stages=", parallel.virtual_stages,
             " needs parallel.schedule=auto (interleaved)");
  CRAM_CHECK(!parallel.sequence_parallel || layout.tensor > 1, kBad,
             "parallel.sequence_parallel needs parallel.tensor of at least 2, got ", layout.tensor);
  // The interleaved schedule takes micro-batches in groups of one a stage.
  const std::int64_t group = parallel.virtual_stages > 1 ? layout.pipeline : 1;
  // (auto: any size may do, so one row must.)
  const std::int64_t micro_batch = std::max<std::int64_t>(t.micro_batch_size, 1);
  const std::int64_t per_micro_step = layout.data * micro_batch * group;
  if (t.batch_quantum % per_micro_step != 0) {
    const std::int64_t ranks = layout.data * group;
    const std::string way_out =
        t.batch_quantum % ranks == 0
            ? concat("nearest legal micro-batch: ", nearest_divisor(t.batch_quantum / ranks, micro_batch))
            : concat("no micro-batch fits, take another number of data ranks or ",
                     t.batch_ramp == 0 ? "train.batch_size=" : "train.batch_quantum=",
                     nearest_multiples(t.batch_quantum, per_micro_step));
    fail(kBad, "train.batch_quantum=", t.batch_quantum,
         t.batch_ramp == 0 ? " (the batch size, since the ramp is off)" : "", " is not a multiple of ", layout.data,
         " data ranks", t.micro_batch_size > 0 ? concat(" x train.micro_batch_size=", micro_batch) : "",
         group > 1 ? concat(" x ", group, " stages (interleaved)") : "", "; ", way_out);
  }
  for (const auto& [key, timeout] :
       {std::pair{"parallel.timeout", &parallel.timeout}, std::pair{"parallel.init_timeout", &parallel.init_timeout}}) {
    CRAM_CHECK(timeout->seconds() > 0, kBad, key, "=", timeout->text(), " must be positive: no answer is instant");
  }
  return config;
}

std::int64_t masked_in_row(const Config& config) {
  return masked_per_row({.seed = 0,
                         .vocab_size = config.model.vocab_size,
                         .seq_length = config.model.seq_length,
                         .mask_rate = config.train.mask_rate});
}

}  // namespace cram
