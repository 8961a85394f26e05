// Padded rows in every kind of layout: batches whose lengths and whose S change from micro-batch to micro-batch give
// one rank's numbers, and a batch that names impossible lengths is refused before it is computed.
#include <ATen/Parallel.h>

#include "parallel/training_support.h"
#include "support/call_source.h"
#include "support/expect_error.h"
#include "train/forward_pass.h"

namespace cram::test {
namespace {

// Ranks are threads already.
const bool kOneThreadEach = [] {
  at::set_num_threads(1);
  return true;
}();

enum class Padding { kKnown, kUnknown, kOtherGarbage };

// Two rows a micro-batch, of 1 to S tokens, where S is 16, 12, 10 by turns; the loss looks at real tokens only.
Batch padded_rows(const ModelConfig& model, std::int64_t first_sample, std::int64_t rows, Padding padding) {
  constexpr std::int64_t kSeqs[] = {16, 12, 10};
  const std::int64_t seq = kSeqs[first_sample / rows % 3];
  std::vector<std::int64_t> ids, positions, labels, lengths;
  for (std::int64_t r = 0; r < rows; ++r) {
    RandomStream random(stream_key(8, "row", static_cast<std::uint64_t>(first_sample + r)));
    RandomStream garbage(stream_key(padding == Padding::kOtherGarbage ? 9 : 10, "garbage",
                                    static_cast<std::uint64_t>(first_sample + r)));
    const auto vocab = static_cast<std::uint64_t>(model.vocab_size);
    lengths.push_back(1 + static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(seq))));
    for (std::int64_t s = 0; s < seq; ++s) {
      const auto word = static_cast<std::int64_t>(random.below(vocab));
      if (s >= lengths.back()) {
        ids.push_back(static_cast<std::int64_t>(garbage.below(vocab)));
      } else if (s % 4 == 0) {
        positions.push_back(r * seq + s);
        labels.push_back(word);
        ids.push_back(4);
      } else {
        ids.push_back(word);
      }
    }
  }
  return batch_of(at::tensor(ids, at::kLong).view({rows, seq}), at::tensor(positions, at::kLong),
                  at::tensor(labels, at::kLong),
                  padding == Padding::kUnknown ? at::Tensor() : at::tensor(lengths, at::kLong));
}

MakeRows rows_with(Padding padding) {
  return [padding](const ModelConfig& model, std::int64_t first, std::int64_t rows) {
    return padded_rows(model, first, rows, padding);
  };
}

TrainingSetup setup_of(Layout layout, Padding padding = Padding::kKnown) {
  TrainingSetup setup;
  setup.layout = layout;
  setup.steps = 4;
  setup.batch_size = 16;
  setup.rows = rows_with(padding);
  return setup;
}

const TrainingResult& reference() {
  static const TrainingResult result = train(setup_of({1, 1, 1}));
  return result;
}

// Losses, norms, gradients and weights of a run against one rank's.
double worst_of_all(const TrainingResult& expected, const TrainingResult& found) {
  return std::max({worst_relative(expected.losses, found.losses), worst_relative(expected.norms, found.norms),
                   worst_norm_error(expected.first_gradients, found.first_gradients).first,
                   worst_norm_error(expected.final, found.final).first});
}

TEST(PaddingInLayouts, EveryLayoutTrainsAsOneRank) {
  ASSERT_TRUE(reference().fine()) << reference().messages[0];
  std::vector<TrainingSetup> all = {setup_of({2, 1, 1}), setup_of({2, 1, 1}), setup_of({1, 2, 1}), setup_of({1, 2, 1}),
                                    setup_of({1, 2, 1}), setup_of({1, 1, 2}), setup_of({2, 2, 2}), setup_of({1, 1, 1}),
                                    setup_of({1, 1, 1}), setup_of({2, 2, 1})};
  all[1].sequence_parallel = true;
  all[3].virtual_stages = 2;
  all[4].schedule = "gpipe";
  all[5].zero = true;
  all[6].sequence_parallel = true;
  all[6].zero = true;
  all[7].recompute = "selective";
  all[8].recompute = "layer";
  all[9].recompute = "layer";
  for (const TrainingSetup& setup : all) {
    const TrainingResult found = train(setup);
    ASSERT_TRUE(found.fine()) << setup.text() << ": " << found.messages[0];
    EXPECT_TRUE(found.norms_agree) << setup.text();
    EXPECT_LE(worst_of_all(reference(), found), 1e-10) << setup.text();
  }
}

TEST(PaddingInLayouts, WhatStandsInThePaddingChangesNothing) {
  for (const Layout& layout : {Layout{1, 1, 1}, Layout{2, 1, 1}, Layout{1, 2, 1}}) {
    TrainingSetup setup = setup_of(layout, Padding::kOtherGarbage);
    setup.sequence_parallel = layout.tensor > 1;
    const TrainingResult found = train(setup);
    ASSERT_TRUE(found.fine()) << setup.text() << ": " << found.messages[0];
    EXPECT_LE(worst_of_all(reference(), found), 1e-10) << setup.text();
  }
}

// The negative control: the same rows without their lengths.
TEST(PaddingInLayouts, WithoutLengthsARunIsAnotherOne) {
  for (const Layout& layout : {Layout{1, 1, 1}, Layout{1, 2, 1}}) {
    const TrainingResult found = train(setup_of(layout, Padding::kUnknown));
    ASSERT_TRUE(found.fine()) << found.messages[0];
    EXPECT_GE(worst_norm_error(reference().first_gradients, found.first_gradients).first, 1e-4) << layout.text();
    EXPECT_GE(worst_norm_error(reference().final, found.final).first, 1e-4) << layout.text();
  }
}

struct Predictions {
  at::Tensor hidden, outputs;  // of real tokens
  double loss = 0, correct = 0;
};

// Forward passes over the rows in a layout; two rows of nine tokens cannot be shared out to four tensor ranks.
Predictions predict(const Layout& layout, bool sequence_parallel, const Batch& batch) {
  Predictions result;
  std::mutex mutex;
  const std::vector<std::string> messages = run_ranks(layout.world_size(), [&](Communicator& world) {
    const at::NoGradGuard no_grad;
    at::set_num_threads(1);
    TrainingSetup setup;
    setup.layout = layout;
    setup.sequence_parallel = sequence_parallel;
    const Config config = training_config(setup);
    const Mesh mesh(world, layout);
    ParameterStore store;
    cram::Model model(config.model, store, make_placement(config, mesh), config.train.objective);
    store.allocate(Precision::kFp64, at::kCPU);
    store.initialize(3);
    ForwardPass pass(model, store, mesh.pipeline());
    const at::Tensor hidden = pass.hidden(batch[field::kIds], batch.find(field::kLengths));
    const at::Tensor outputs = pass.outputs(batch[field::kIds], batch[field::kPositions], batch.find(field::kLengths));
    const Objective::Evaluation evaluation = pass.evaluate(batch);
    const std::lock_guard lock(mutex);
    if (mesh.is_first_stage()) result.hidden = hidden, result.outputs = outputs;
    if (mesh.is_last_stage()) {
      result.loss = evaluation.loss_sum.item<double>();
      result.correct = static_cast<double>(evaluation.correct.item<std::int64_t>());
    }
  });
  for (const std::string& message : messages) EXPECT_EQ(message, "") << layout.text();
  return result;
}

TEST(PaddingInLayouts, ForwardPassesGiveTheUnpaddedRowsNumbers) {
  const ModelConfig model = layout_model();
  constexpr std::int64_t kSeq = 9, kLength = 5;
  const at::Tensor ids = at::arange(2 * kSeq, at::kLong).mul(13).remainder(model.vocab_size).view({2, kSeq});
  const auto batch_with = [&](const at::Tensor& rows, const at::Tensor& lengths) {
    const std::int64_t seq = rows.size(1);
    const at::Tensor positions = at::tensor({std::int64_t{0}, std::int64_t{4}, seq, seq + 4}, at::kLong);
    return batch_of(rows, positions, at::tensor({7, 8, 9, 10}, at::kLong), lengths);
  };
  const Batch full = batch_with(ids.narrow(1, 0, kLength).contiguous(), {});
  const Batch padded = batch_with(ids, at::full({2}, kLength, at::kLong));
  const Predictions expected = predict({1, 1, 1}, false, full);
  const auto worst = [&](const Predictions& found) {
    return std::max({relative_error(found.hidden.narrow(1, 0, kLength), expected.hidden),
                     relative_error(found.outputs, expected.outputs), std::abs(found.loss / expected.loss - 1)});
  };
  for (const auto& [layout, sequence_parallel] : {std::pair{Layout{1, 1, 1}, false},
                                                  {Layout{2, 1, 1}, false},
                                                  {Layout{4, 1, 1}, true},
                                                  {Layout{1, 2, 1}, false},
                                                  {Layout{2, 2, 1}, true}}) {
    const Predictions found = predict(layout, sequence_parallel, padded);
    EXPECT_LE(worst(found), 1e-12) << layout.text();
    EXPECT_EQ(found.correct, expected.correct) << layout.text();
    EXPECT_GE(worst(predict(layout, sequence_parallel, batch_with(ids, {}))), 1e-5) << layout.text();
  }
}

TEST(PaddingInLayouts, ImpossibleLengthsAreRefused) {
  const at::NoGradGuard no_grad;
  const ModelConfig config = layout_model();
  Model one(config, Precision::kFp64);
  ForwardPass pass(one.model, one.store, self_group());
  const Batch good = padded_rows(config, 0, 2, Padding::kKnown);
  Batch batch = good;
  CallSource source([&] { return batch; });
  TrainingStepSettings settings;
  settings.micro_steps.micro_batch = 2;
  TrainingStep step(one.model, one.store, self_mesh(), settings, source);
  const auto refused = [&](const at::Tensor& lengths, ExitCode code, std::initializer_list<std::string> words) {
    batch.set(field::kLengths, lengths);
    expect_error(
        code, words, [&] { (void)step.run({}); }, "training");
    expect_error(
        code, words, [&] { (void)pass.evaluate(batch); }, "evaluation");
    expect_error(
        code, words, [&] { (void)pass.hidden(batch[field::kIds], lengths); }, "hidden states");
  };
  refused(at::tensor({0, 3}, at::kLong), ExitCode::kData, {"row 0", "has 0 tokens", "expected 1 to 16"});
  refused(at::tensor({3, 0}, at::kLong), ExitCode::kData, {"row 1", "has 0 tokens", "expected 1 to 16"});
  refused(at::tensor({16, 17}, at::kLong), ExitCode::kData, {"row 1", "has 17 tokens", "expected 1 to 16"});
  refused(at::tensor({-1, 2}, at::kLong), ExitCode::kData, {"row 0", "has -1 tokens", "expected 1 to 16"});
  refused(at::tensor({3}, at::kLong), ExitCode::kOther, {"2 int64 numbers on the host", "of 1"});
  refused(at::tensor({3, 3, 3}, at::kLong), ExitCode::kOther, {"2 int64 numbers on the host", "of 3"});
  refused(at::tensor({3.0, 3.0}, at::kDouble), ExitCode::kOther, {"2 int64 numbers on the host", "Double"});
  batch = good;
  EXPECT_TRUE(step.run({.lr = 1e-3}).finite);
  EXPECT_TRUE(std::isfinite(pass.evaluate(batch).loss_sum.item<double>()));
}

}  // namespace
}  // namespace cram::test
