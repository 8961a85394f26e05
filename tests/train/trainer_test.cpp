#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <chrono>
#include <cmath>

#include "data/data_support.h"
#include "data/loader.h"
#include "eval/mlm.h"
#include "parallel/communicator_suite.h"
#include "parallel/grad_sync.h"
#include "support/golden.h"
#include "support/thread_ranks.h"
#include "train/trainer.h"

namespace cram {
namespace {

using test::Model;
using test::run_ranks;
using testing::TemporaryFolder;

LoaderSettings loader_settings(const Config& config, const Mesh& mesh) {
  LoaderSettings settings;
  settings.micro_batch = config.train.micro_batch_size;
  settings.mask_rate = config.train.mask_rate;
  settings.dp_rank = mesh.place().dp_rank;
  settings.dp_size = mesh.layout().data;
  return settings;
}

ModelConfig tiny_config() { return test::model_of(1, 16, 2, 24, 21, 8); }

// Rank 1 begins 0.3 s late: with a clock of its own its figures would lag by that much for ever.
TEST(Trainer, EveryRankUsesTheClockOfRankZero) {
  const TemporaryFolder folder;
  testing::write_prepared(folder.path("s"), testing::counting_rows(40, 8, 21), testing::counting_rows(4, 8, 21),
                          {8, 21, 700});
  std::filesystem::create_directories(folder.path("r"));
  std::vector<Summary> ends(2);
  std::vector<at::Tensor> masters(2);
  const StopSignals signals;
  const auto messages = run_ranks(2, [&](Communicator& world) {
    const at::NoGradGuard no_grad;
    const auto rank = static_cast<std::size_t>(world.rank());
    const Mesh mesh(world, Layout{.tensor = 1, .pipeline = 1, .data = 2});
    Config config;
    config.model = tiny_config();
    config.train.precision = "fp32";
    config.run.stop_after = {3, "steps"};
    config.train.budget = {1, "h"};
    config.train.batch_size = config.train.batch_quantum = 8;
    config.train.micro_batch_size = 4;
    const RunDescription described{resolve_train_config(config, mesh.layout()), mesh.layout(), {}, {}};
    Model model(config.model, Precision::kFp32);
    const auto shards = std::make_shared<ShardSet>(ShardSet::open(folder.path("s"), "train"));
    Loader batches(shards, loader_settings(config, mesh), 0);
    Trainer trainer(
        {described, mesh, model.model, model.store, batches, shards->rows(), signals, folder.path("r"), {}, [] {
           return EvalRecord{};
         }});
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    ends[rank] = trainer.run();
    masters[rank] = model.store.buffers()[0].master.clone();
  });
  EXPECT_EQ(messages, std::vector<std::string>(2));
  EXPECT_EQ(ends[0].progress.step, 3);
  EXPECT_EQ(ends[0].progress.elapsed_s, ends[1].progress.elapsed_s);
  EXPECT_TRUE(masters[0].equal(masters[1]));
}

// What a trainer of two data ranks needs, and how its ranks' runs ended.
struct TwoRanks {
  TemporaryFolder folder;
  StopSignals signals;
  std::vector<Summary> ends{2};

  TwoRanks() {
    testing::write_prepared(folder.path("s"), testing::counting_rows(40, 8, 21), testing::counting_rows(4, 8, 21),
                            {8, 21, 700});
    std::filesystem::create_directories(folder.path("r"));
  }
  /// `prepare` sees each rank's weights before training, `evaluate` is called every second step.
  std::vector<std::string> run(const std::function<void(Config&)>& change,
                               const std::function<void(ParameterStore&, int rank)>& prepare,
                               const std::function<void(ParameterStore&, int rank)>& evaluate) {
    return run_ranks(2, [&](Communicator& world) {
      const at::NoGradGuard no_grad;
      const Mesh mesh(world, Layout{.data = 2});
      Config config;
      config.model = tiny_config();
      config.train.precision = "fp32";
      config.train.budget = {6, "steps"};
      config.train.batch_size = config.train.batch_quantum = 8;
      config.train.micro_batch_size = 4;
      config.eval.every = {2, "steps"};
      change(config);
      const RunDescription described{resolve_train_config(config, mesh.layout()), mesh.layout(), {}, {}};
      Model model(config.model, Precision::kFp32);
      prepare(model.store, world.rank());
      const auto shards = std::make_shared<ShardSet>(ShardSet::open(folder.path("s"), "train"));
      Loader batches(shards, loader_settings(config, mesh), 0);
      Trainer trainer(
          {described, mesh, model.model, model.store, batches, shards->rows(), signals, folder.path("r"), {}, [&] {
             evaluate(model.store, world.rank());
             return EvalRecord{};
           }});
      ends[static_cast<std::size_t>(world.rank())] = trainer.run();
    });
  }
};

const auto kNothing = [](ParameterStore&, int) {};

// A bit that flips on one rank after step 2 is found by the next comparison, at step 3.
TEST(Trainer, CheckSyncFindsAReplicaThatWentApart) {
  const auto flip = [](ParameterStore& store, int rank) {
    if (rank == 1) store.weight(store.find("encoder.layers.0.ffn.dense_in.weight"))[0][0].add_(1e-7);
  };
  TwoRanks two;
  const auto messages = two.run([](Config& config) { config.parallel.check_sync = 3; }, kNothing, flip);
  for (const std::string& message : messages) {
    EXPECT_NE(message.find("after step 3 ranks differ"), std::string::npos) << message;
    EXPECT_NE(message.find("encoder.layers.0.ffn.dense_in.weight: ranks 0 and 1 differ"), std::string::npos) << message;
  }
  TwoRanks unwatched;
  EXPECT_EQ(unwatched.run([](Config&) {}, kNothing, flip), std::vector<std::string>(2));
  TwoRanks intact;
  EXPECT_EQ(intact.run([](Config& config) { config.parallel.check_sync = 1; }, kNothing, kNothing),
            std::vector<std::string>(2));
}

// Not-a-number on one rank: all skip the same steps, and count alike; five in a row end all of them.
TEST(Trainer, NonFiniteOnOneRankIsSkippedByAll) {
  const auto spoil = [](ParameterStore& store, int rank) {
    if (rank == 1) store.weight(store.find("encoder.final_norm.weight"))[3].fill_(std::nan(""));
  };
  TwoRanks two;
  EXPECT_EQ(two.run(
                [](Config& config) {
                  config.train.budget = {3, "steps"};
                },
                spoil, kNothing),
            std::vector<std::string>(2));
  for (const Summary& end : two.ends) {
    EXPECT_EQ(end.progress.step, 3);
    EXPECT_EQ(end.progress.skipped, 3);
  }
  TwoRanks longer;
  for (const std::string& message : longer.run([](Config&) {}, spoil, kNothing)) {
    EXPECT_NE(message.find("(5 in a row)"), std::string::npos) << message;
  }
}

// Several buckets, a last one that is not full, a small second buffer, padding between parameters; shared out or not;
// complete early, late or in part.
TEST(GradSync, EveryElementOfEveryBufferIsSummed) {
  for (const int ranks : {1, 2, 3}) {
    for (const bool shared_out : {false, true}) {
      for (const bool overlap : {false, true}) {
        const auto messages = run_ranks(ranks, [&](Communicator& world) {
          const Mesh mesh(world, Layout{.data = ranks});
          const Partition partition{shared_out ? world.rank() : 0, shared_out ? ranks : 1, 1000};
          std::vector<GradSync::Buffer> buffers;
          for (const std::int64_t units : {17, 1}) {
            const std::int64_t count = units * partition.alignment();
            GradSync::Buffer b;
            b.grad = at::arange(count, at::kDouble) + world.rank();
            b.owned = shared_out && ranks > 1 ? at::zeros({count / ranks}, at::kDouble) : b.grad;
            b.buckets = cut_buckets(count, partition);
            b.parameters = {{0, count / 2}, {count / 2 + 3, count}};
            buffers.push_back(b);
          }
          GradSync sync(buffers, mesh, overlap);
          for (int batch = 0; batch < 2; ++batch) {
            for (const GradSync::Buffer& b : buffers)
              b.grad.copy_(at::arange(b.grad.numel(), at::kDouble) + world.rank());
            sync.ready(0, buffers[0].parameters[1]);
            sync.poll();
            if (batch == 0) sync.ready(0, buffers[0].parameters[0]);
            sync.finish();
            for (const GradSync::Buffer& b : buffers) {
              const at::Tensor expected = at::arange(b.grad.numel(), at::kDouble) * ranks + ranks * (ranks - 1) / 2;
              for (const Bucket& bucket : b.buckets) {
                test::require(at::equal(b.owned.narrow(0, bucket.at, bucket.owned()),
                                        expected.slice(0, bucket.own_begin, bucket.own_end)),
                              "bucket");
              }
            }
            const GradSync::Times times = sync.take_times();
            test::require((times.started_early > 0) == overlap, "started early");
          }
        });
        EXPECT_EQ(messages, std::vector<std::string>(static_cast<std::size_t>(ranks)));
      }
    }
  }
}

TEST(Buckets, CoverEveryElementOnceForEveryNumberOfRanks) {
  for (const int size : {1, 2, 3, 5, 8}) {
    for (const std::int64_t units : {0, 1, 7, 100}) {
      for (const std::int64_t elements : {1, 64, 1000, 1 << 22}) {
        std::int64_t covered = 0;
        for (int rank = 0; rank < size; ++rank) {
          const Partition partition{rank, size, elements};
          std::int64_t at = 0;
          for (const Bucket& bucket : cut_buckets(units * partition.alignment(), partition)) {
            EXPECT_EQ(bucket.at, at);
            EXPECT_EQ(bucket.numel(), bucket.owned() * size);
            EXPECT_EQ(bucket.own_begin, bucket.begin + bucket.owned() * rank);
            at += bucket.owned();
          }
          covered += at;
        }
        EXPECT_EQ(covered, units * 64 * size);
      }
    }
  }
}

// Logits are 8 for token 7 and 0 for the others, whatever the input; the last two of seven rows are token 9 throughout.
TEST(EvaluateMlm, LossAndAccuracyByHandForEveryNumberOfRanks) {
  const TemporaryFolder folder;
  testing::Rows held_out(5, std::vector<std::uint32_t>(8, 7));
  held_out.insert(held_out.end(), 2, std::vector<std::uint32_t>(8, 9));
  testing::write_prepared(folder.path(), held_out, held_out, {8, 21, 700});
  for (const int ranks : {1, 2, 3}) {
    const auto messages = run_ranks(ranks, [&](Communicator& world) {
      const at::NoGradGuard no_grad;
      Model model(tiny_config(), Precision::kFp64);
      for (FlatBuffers& b : model.store.buffers()) b.master.zero_();
      model.store.master(model.store.find("encoder.final_norm.bias")).fill_(0.5);
      model.store.master(model.store.find("encoder.embedding.word_embedding.weight"))[7].fill_(1);
      ShardSet shards = ShardSet::open(folder.path(), "validation");
      const EvalRecord record =
          evaluate_mlm(model.model, model.store, shards, {.rows = 100, .micro_batch = 2, .mask_rate = 0.25},
                       Mesh(world, Layout{.data = ranks}));
      EXPECT_EQ(record.masked, 14);
      EXPECT_DOUBLE_EQ(record.accuracy, 10.0 / 14);
      EXPECT_NEAR(record.loss, std::log(std::exp(8.0) + 20) - 8 * 10.0 / 14, 1e-12);
    });
    EXPECT_EQ(messages, std::vector<std::string>(static_cast<std::size_t>(ranks)));
  }
}

}  // namespace
}  // namespace cram
