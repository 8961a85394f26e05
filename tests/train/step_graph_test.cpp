// Recorded micro-steps and prefetched micro-batches, with a recorder and a transfer of the CPU: what is run, recorded
// and replayed when, and the same numbers as without.
#include "train/step_graph.h"

#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include "base/check.h"
#include "support/call_source.h"
#include "support/golden.h"
#include "support/thread_ranks.h"
#include "train/batch_prefetch.h"
#include "train/training_step.h"

namespace cram {
namespace {

using test::Model;
using test::run_ranks;

struct Counts {
  int warm_ups = 0, records = 0, replays = 0;
  bool fails = false;
};

// Keeps the work and runs it at every replay: what it reads must be at the addresses of the time it was recorded.
class FakeRecorder final : public GraphRecorder {
 public:
  explicit FakeRecorder(Counts& counts) : counts_(counts) {}
  void warm_up(const std::function<void()>& work) override {
    ++counts_.warm_ups;
    work();
  }
  std::unique_ptr<RecordedStep> record(const std::function<void()>& work) override {
    if (counts_.fails) fail(ExitCode::kOther, "cannot be recorded");
    ++counts_.records;
    return std::make_unique<Recorded>(counts_, work);
  }

 private:
  class Recorded final : public RecordedStep {
   public:
    Recorded(Counts& counts, std::function<void()> work) : counts_(counts), work_(std::move(work)) {}
    void replay() override {
      ++counts_.replays;
      work_();
    }

   private:
    Counts& counts_;
    std::function<void()> work_;
  };
  Counts& counts_;
};

Batch batch_of(std::int64_t value, std::int64_t masked) {
  return test::batch_of(at::full({2, 3}, value, at::kLong), at::arange(masked), at::full({masked}, value, at::kLong));
}

TEST(StepGraphs, WarmsUpRecordsOnceAndReplaysEveryShape) {
  Counts counts;
  StepGraphs graphs(std::make_unique<FakeRecorder>(counts), /*required=*/true);
  std::vector<std::int64_t> seen;
  const void* address[2] = {nullptr, nullptr};
  for (std::int64_t i = 0; i < 10; ++i) {
    const std::int64_t masked = 1 + i % 2;
    graphs.run(batch_of(i, masked), [&](const Batch& fixed) {
      seen.push_back(fixed["ids"][1][2].item<std::int64_t>());
      EXPECT_TRUE(at::equal(fixed["labels"], fixed["ids"].flatten().narrow(0, 0, masked)));
      EXPECT_TRUE(at::equal(fixed["positions"], at::arange(masked)));
      const void*& first = address[masked - 1];
      if (first == nullptr) first = fixed["ids"].const_data_ptr();
      EXPECT_EQ(fixed["ids"].const_data_ptr(), first) << "a record would read the wrong memory";
    });
  }
  EXPECT_EQ(seen, (std::vector<std::int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  EXPECT_EQ(counts.warm_ups, 2 * StepGraphs::kWarmUps);
  EXPECT_EQ(counts.records, 2);
  EXPECT_EQ(counts.replays, 10 - 2 * StepGraphs::kWarmUps);
}

TEST(StepGraphs, FurtherShapesRunAsTheyAre) {
  Counts counts;
  StepGraphs graphs(std::make_unique<FakeRecorder>(counts), /*required=*/true);
  int ran = 0;
  for (int round = 0; round < 4; ++round) {
    for (std::int64_t masked = 1; masked <= 6; ++masked) {
      graphs.run(batch_of(masked, masked), [&ran](const Batch&) { ++ran; });
    }
  }
  EXPECT_EQ(ran, 24);
  EXPECT_EQ(counts.records, static_cast<int>(StepGraphs::kMostShapes));
  EXPECT_EQ(counts.replays, 2 * static_cast<int>(StepGraphs::kMostShapes));
}

TEST(StepGraphs, WhatCannotBeRecordedRunsAsItIsUnlessRequired) {
  for (const bool required : {false, true}) {
    Counts counts;
    counts.fails = true;
    StepGraphs graphs(std::make_unique<FakeRecorder>(counts), required);
    int ran = 0;
    const auto step = [&] { graphs.run(batch_of(1, 2), [&ran](const Batch&) { ++ran; }); };
    for (int i = 0; i < StepGraphs::kWarmUps; ++i) step();
    if (required) {
      EXPECT_THROW(step(), Error);
      EXPECT_EQ(ran, StepGraphs::kWarmUps);
    } else {
      step();
      step();
      EXPECT_EQ(ran, StepGraphs::kWarmUps + 2);
      EXPECT_EQ(counts.warm_ups, StepGraphs::kWarmUps);
    }
  }
}

TEST(StepGraphs, AreChosenWhereTheyAreLegal) {
  const at::Device gpu(at::kCUDA, 0), cpu(at::kCPU);
  Config config;
  EXPECT_TRUE(choose_cuda_graph(config, {}, gpu).use);
  EXPECT_TRUE(choose_cuda_graph(config, Layout{.data = 4}, gpu).use);
  EXPECT_FALSE(choose_cuda_graph(config, {}, cpu).use);
  EXPECT_NE(choose_cuda_graph(config, Layout{.pipeline = 2}, gpu).reason.find("parallel.pipeline=2"),
            std::string::npos);
  EXPECT_NE(choose_cuda_graph(config, Layout{.tensor = 2}, gpu).reason.find("parallel.tensor=2"), std::string::npos);
  config.model.dropout = 0.1;
  EXPECT_FALSE(choose_cuda_graph(config, {}, gpu).use);
  config.run.cuda_graph = "on";
  EXPECT_THROW((void)choose_cuda_graph(config, {}, gpu), Error);
  config.model.dropout = 0;
  EXPECT_THROW((void)choose_cuda_graph(config, {}, cpu), Error);
  config.run.cuda_graph = "off";
  EXPECT_FALSE(choose_cuda_graph(config, {}, gpu).use);
}

// Rows whose number of masked tokens changes with the batch.
Batch made_batch(std::int64_t number) {
  const at::Tensor ids = (at::arange(2 * 8) * 7 + number * 3).remainder(16).add(5).view({2, 8});
  const at::Tensor positions = number % 3 == 0 ? at::tensor({1, 6, 12}, at::kLong) : at::tensor({0, 9}, at::kLong);
  return test::batch_of(ids, positions, ids.flatten().index_select(0, positions));
}

struct Trained {
  std::vector<at::Tensor> grads;
  double loss = 0, masked = 0;
};

Trained train(Communicator& world, Counts* counts) {
  const at::NoGradGuard no_grad;
  const Mesh mesh(world, Layout{.data = world.size()});
  Config config;
  config.model = test::model_of(2, 16, 2, 24, 21, 8);
  config.train.micro_batch_size = 2;
  Model model(config.model, Precision::kFp32);
  std::int64_t next = world.rank();
  test::CallSource source([&] {
    const Batch batch = made_batch(next);
    next += world.size();
    return batch;
  });
  auto graphs = counts == nullptr
                    ? nullptr
                    : std::make_unique<StepGraphs>(std::make_unique<FakeRecorder>(*counts), /*required=*/true);
  TrainingStep training_step(model.model, model.store, mesh, training_step_settings(config), source, std::move(graphs));
  Trained trained;
  TrainingStep::Watch watch;
  watch.reduced = [&] {
    for (const FlatBuffers& b : model.store.buffers()) trained.grads.push_back(b.grad.clone());
  };
  for (std::int64_t step = 1; step <= 3; ++step) {
    const auto result = training_step.run({.step = step, .update = step, .micro_batches = 4, .lr = 1e-3}, watch);
    trained.loss += result.loss;
    trained.masked += result.count;
  }
  return trained;
}

TEST(StepGraphs, GiveTheNumbersOfStepsWithoutThem) {
  for (const int ranks : {1, 2}) {
    const auto messages = run_ranks(ranks, [&](Communicator& world) {
      const Trained plain = train(world, nullptr);
      Counts counts;
      const Trained recorded = train(world, &counts);
      if (recorded.loss != plain.loss || recorded.masked != plain.masked) {
        fail(ExitCode::kOther, "loss ", recorded.loss, ", without graphs ", plain.loss);
      }
      for (std::size_t i = 0; i < plain.grads.size(); ++i) {
        if (!at::equal(recorded.grads[i], plain.grads[i])) fail(ExitCode::kOther, "gradient ", i, " differs");
      }
      // Two shapes; with data ranks the last of four micro-steps exchanges gradients and is never recorded.
      const int recordable = ranks == 1 ? 12 : 9;
      if (counts.warm_ups != 4 || counts.records != 2 || counts.replays != recordable - 4) {
        fail(ExitCode::kOther, counts.warm_ups, " warm-ups, ", counts.records, " records, ", counts.replays,
             " replays");
      }
    });
    EXPECT_EQ(messages, std::vector<std::string>(static_cast<std::size_t>(ranks)));
  }
}

// Says what it does.
class FakeTransfer final : public BatchTransfer {
 public:
  explicit FakeTransfer(std::string& log) : log_(log) {}
  bool overlaps() const override { return true; }
  Batch start(const Batch& host) override {
    log_ += concat(" start", host.rows);
    return host;
  }
  void finish(const Batch& on_device) override { log_ += concat(" finish", on_device.rows); }

 private:
  std::string& log_;
};

TEST(BatchPrefetch, StartsTheNextCopyEarlyAndKeepsTheOrder) {
  std::string log;
  std::int64_t made = 0;
  test::CallSource source([&] {
    if (made == 3) fail(ExitCode::kOther, "no more");
    return Batch(made++, 1);
  });
  BatchPrefetch batches(source, std::make_unique<FakeTransfer>(log));
  EXPECT_EQ(batches.next().rows, 0);
  batches.start();
  batches.start();  // one is on its way
  EXPECT_EQ(batches.next().rows, 1);
  batches.start();
  EXPECT_EQ(batches.next().rows, 2);
  batches.start();  // the fault waits until somebody needs the batch
  EXPECT_THROW((void)batches.next(), Error);
  EXPECT_EQ(log, " start0 finish0 start1 finish1 start2 finish2");
}

TEST(BatchPrefetch, FetchesNothingEarlyOnACpu) {
  int made = 0;
  test::CallSource source([&] { return Batch(++made, 1); });
  BatchPrefetch batches(source, make_batch_transfer(at::kCPU));
  batches.start();
  EXPECT_EQ(made, 0);
  EXPECT_EQ(batches.next().rows, 1);
}

}  // namespace
}  // namespace cram
