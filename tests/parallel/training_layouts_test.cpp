// One rank and N ranks give the same numbers: every layout of the list against one process, as threads, with a negative
// control for each reduction.
#include <ATen/Parallel.h>

#include <csignal>

#include "parallel/training_support.h"
#include "support/expect_error.h"
#include "train/run_plan.h"

namespace cram::test {
namespace {

// Ranks are threads already.
const bool kOneThreadEach = [] {
  at::set_num_threads(1);
  return true;
}();

TrainingSetup setup_of(int tensor, int pipeline, int data, std::int64_t virtual_stages = 1) {
  TrainingSetup setup;
  setup.layout = {tensor, pipeline, data};
  setup.virtual_stages = virtual_stages;
  return setup;
}

std::vector<TrainingSetup> layouts() {
  std::vector<TrainingSetup> all = {setup_of(1, 1, 1),   setup_of(1, 1, 2), setup_of(2, 1, 1), setup_of(1, 2, 1),
                                    setup_of(2, 1, 2),   setup_of(1, 2, 2), setup_of(2, 2, 1), setup_of(4, 1, 1),
                                    setup_of(1, 4, 1),   setup_of(1, 1, 4), setup_of(2, 2, 2), setup_of(1, 2, 1, 2),
                                    setup_of(1, 2, 2, 2)};
  return all;
}

// The list with ZeRO off and on, and with rows shared out where there are tensor ranks.
std::vector<TrainingSetup> variants() {
  std::vector<TrainingSetup> all;
  for (TrainingSetup setup : layouts()) {
    for (const bool zero : {false, true}) {
      setup.zero = zero;
      setup.sequence_parallel = false;
      all.push_back(setup);
      if (setup.layout.tensor == 1) continue;
      setup.sequence_parallel = true;
      all.push_back(setup);
    }
  }
  return all;
}

const TrainingResult& reference(Precision precision = Precision::kFp64) {
  static std::map<Precision, TrainingResult> results;
  auto found = results.find(precision);
  if (found == results.end()) {
    TrainingSetup one;
    one.precision = precision;
    found = results.emplace(precision, train(one)).first;
    EXPECT_TRUE(found->second.fine()) << found->second.messages[0];
  }
  return found->second;
}

void expect_fine(const TrainingResult& result, const std::string& what) {
  for (std::size_t r = 0; r < result.messages.size(); ++r) EXPECT_EQ(result.messages[r], "") << what << ", rank " << r;
}

class LayoutVariant : public testing::TestWithParam<TrainingSetup> {};

TEST_P(LayoutVariant, TrainsLikeOneRankInFp64) {
  const TrainingSetup& setup = GetParam();
  const TrainingResult& one = reference();
  const TrainingResult many = train(setup);
  ASSERT_TRUE(many.fine()) << (expect_fine(many, setup.text()), setup.text());
  ASSERT_EQ(one.initial.size(), many.initial.size());
  for (const auto& [name, tensor] : one.initial) EXPECT_TRUE(at::equal(tensor, many.initial.at(name))) << name;
  const auto [gradients, where] = worst_norm_error(one.first_gradients, many.first_gradients);
  EXPECT_LE(gradients, 1e-10) << where;
  for (const auto& [name, gradient] : many.first_gradients) EXPECT_GT(gradient.abs().max().item<double>(), 0) << name;
  EXPECT_LE(worst_relative(one.losses, many.losses), 1e-12);
  EXPECT_LE(worst_relative(one.norms, many.norms), 1e-10);
  EXPECT_TRUE(many.norms_agree);
  EXPECT_LE(worst_norm_error(one.final, many.final).first, 1e-9);
  EXPECT_LE(worst_norm_error(one.states.at("exp_avg"), many.states.at("exp_avg")).first, 1e-9);
  EXPECT_LE(worst_norm_error(one.states.at("exp_avg_sq"), many.states.at("exp_avg_sq")).first, 1e-9);
  ASSERT_EQ(many.tied_first.size(), many.tied_last.size());
  EXPECT_EQ(many.tied_first.size(), setup.layout.pipeline > 1 ? 20U : 0U);
  for (std::size_t i = 0; i < many.tied_first.size(); ++i) {
    EXPECT_TRUE(at::equal(many.tied_first[i], many.tied_last[i])) << "step " << i + 1;
  }
}

TEST_P(LayoutVariant, TrainsLikeOneRankInFp32) {
  TrainingSetup setup = GetParam();
  setup.precision = Precision::kFp32;
  const TrainingResult& one = reference(Precision::kFp32);
  const TrainingResult many = train(setup);
  ASSERT_TRUE(many.fine()) << (expect_fine(many, setup.text()), setup.text());
  EXPECT_LE(std::abs(many.losses[0] - one.losses[0]) / one.losses[0], 1e-6);
  EXPECT_LE(worst_norm_error(one.first_gradients, many.first_gradients).first, 1e-4);
  EXPECT_LE(worst_relative(one.losses, many.losses), 1e-5);
  EXPECT_TRUE(many.norms_agree);
}

TEST_P(LayoutVariant, SendsTheBytesOfTheFormulas) {
  TrainingSetup setup = GetParam();
  setup.steps = 1;
  const TrainingResult result = train(setup);
  ASSERT_TRUE(result.fine());
  std::int64_t masked = Rows::batch(layout_model(), 0, setup.batch_size)[field::kLabels].numel();
  Config config = training_config(setup);
  config.train.precision = "fp64";
  Traffic expected = plan_run(config, setup.layout, setup.batch_size, 0, masked).traffic;
  // Here every rank makes its rows itself; what a reading rank tells the others is counted in shared_rows_test.
  const std::int64_t tokens = setup.batch_size * config.model.seq_length;
  if (setup.layout.tensor > 1) {
    expected.tensor -= static_cast<double>((setup.layout.pipeline > 1 ? 2 : 1) * tokens * 4);
  }
  std::map<std::string, double> measured;
  for (const auto& [what, bytes] : result.bytes_per_step) measured[what.substr(0, what.find(' '))] += bytes;
  const auto close = [](double a, double b) { return std::abs(a - b) <= 1e-9 * std::max(a, b); };
  EXPECT_TRUE(close(measured["tensor"], expected.tensor)) << measured["tensor"] << " against " << expected.tensor;
  EXPECT_TRUE(close(measured["pipeline"], expected.pipeline)) << measured["pipeline"] << " / " << expected.pipeline;
  EXPECT_TRUE(close(measured["data"], expected.data)) << measured["data"] << " against " << expected.data;
  EXPECT_TRUE(close(measured["tied"], expected.tied)) << measured["tied"] << " against " << expected.tied;
}

INSTANTIATE_TEST_SUITE_P(All, LayoutVariant, testing::ValuesIn(variants()), [](const auto& parameter) {
  std::string name = concat(parameter.index, "_", parameter.param.text());
  for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : '_';
  return name;
});

// Skipping any one reduction must be seen, in the gradients or in the weights after some steps.
TEST(NegativeControls, EverySkippedReductionIsSeen) {
  struct Control {
    TrainingSetup setup;
    const char* group;
    const char* operation;
  };
  const auto with = [](TrainingSetup setup, bool zero, bool sequence_parallel) {
    setup.zero = zero;
    setup.sequence_parallel = sequence_parallel;
    return setup;
  };
  const Control controls[] = {
      {setup_of(1, 1, 2), "data", "all_reduce"},
      {with(setup_of(1, 1, 2), true, false), "data", "reduce_scatter"},
      {with(setup_of(1, 1, 2), true, false), "data", "all_gather"},
      {setup_of(2, 1, 1), "tensor", "all_reduce"},
      {setup_of(2, 1, 1), "tensor", "all_gather"},
      {with(setup_of(2, 1, 1), false, true), "tensor", "all_reduce"},  // gradients of norms and the position scale
      {with(setup_of(2, 1, 1), false, true), "tensor", "all_gather"},
      {with(setup_of(2, 1, 1), false, true), "tensor", "reduce_scatter"},
      {setup_of(1, 2, 1), "tied", "all_reduce"},
      {with(setup_of(1, 2, 2), true, false), "tied", "all_reduce"},
  };
  for (Control control : controls) {
    control.setup.sabotage = {control.group, control.operation};
    control.setup.steps = 3;
    const TrainingResult broken = train(control.setup);
    ASSERT_TRUE(broken.fine()) << broken.messages[0];
    const double gradients = worst_norm_error(reference().first_gradients, broken.first_gradients).first;
    const std::vector<double> losses(reference().losses.begin(), reference().losses.begin() + 3);
    EXPECT_GT(std::max(gradients, worst_relative(losses, broken.losses)), 1e-6)
        << control.setup.text() << ": " << control.group << " " << control.operation;
  }
}

TEST(GradientNormOfALayout, CountsEveryParameterOnce) {
  const double expected = std::sqrt(static_cast<double>(parameter_count(layout_model())));
  for (TrainingSetup setup : variants()) {
    setup.steps = 1;
    double masked = 0;
    setup.meddle = [](ParameterStore& store, const Mesh&, std::int64_t) {
      // Padding rows of the vocabulary have no gradient.
      for (ParamId id = 0; id < store.size(); ++id) {
        const ParamSpec& spec = store.spec(id);
        const at::Tensor ones = take_slice(at::ones(spec.global_shape, at::kDouble), spec).reshape({-1});
        for (const ParameterStore::OwnedRange& range : store.owned(id)) {
          range.grad.copy_(ones.slice(0, range.begin, range.end));
        }
      }
    };
    masked = static_cast<double>(Rows::batch(layout_model(), 0, setup.batch_size)[field::kLabels].numel());
    const TrainingResult result = train(setup);
    ASSERT_TRUE(result.fine()) << result.messages[0];
    EXPECT_NEAR(result.norms[0] * masked, expected, 1e-9 * expected) << setup.text();
  }
}

// The same training by every schedule, with fewer micro-batches than stages, and with one.
TEST(PipelineSchedules, GiveTheGradientsOfNoPipeline) {
  struct Row {
    int stages;
    std::int64_t virtual_stages;
    const char* schedule;
  };
  for (const std::int64_t micro_batch : {3, 6, 12, 24}) {  // 8, 4, 2 and 1 micro-batches
    TrainingSetup one;
    one.steps = 2;
    one.micro_batch = micro_batch;
    const TrainingResult expected = train(one);
    for (const Row& row : {Row{2, 1, "auto"}, Row{4, 1, "auto"}, Row{2, 1, "gpipe"}, Row{4, 1, "gpipe"},
                           Row{2, 2, "auto"}, Row{3, 1, "auto"}}) {
      TrainingSetup setup = setup_of(1, row.stages, 1, row.virtual_stages);
      setup.schedule = row.schedule;
      setup.steps = 2;
      setup.micro_batch = micro_batch;
      if (row.virtual_stages > 1 && 24 / micro_batch % row.stages != 0) continue;
      const TrainingResult found = train(setup);
      ASSERT_TRUE(found.fine()) << setup.text() << ": " << found.messages[0];
      EXPECT_LE(worst_norm_error(expected.first_gradients, found.first_gradients).first, 1e-10) << setup.text();
      EXPECT_LE(worst_relative(expected.losses, found.losses), 1e-12) << setup.text();
    }
  }
}

// A batch is a batch, however it is cut; rows differ in their masked positions, some have none.
TEST(Batches, AnyMicroBatchAccumulationAndDataRanksGiveTheSame) {
  for (const std::int64_t micro_batch : {1, 4, 8, 24}) {
    for (const int data : {1, 2, 3}) {
      if (24 % (micro_batch * data) != 0) continue;
      TrainingSetup setup = setup_of(1, 1, data);
      setup.micro_batch = micro_batch;
      const TrainingResult found = train(setup);
      ASSERT_TRUE(found.fine()) << found.messages[0];
      EXPECT_LE(worst_norm_error(reference().first_gradients, found.first_gradients).first, 1e-10);
      EXPECT_LE(worst_relative(reference().losses, found.losses), 1e-12) << micro_batch << " x " << data;
    }
  }
  // Negative control: another batch.
  TrainingSetup other;
  other.batch_size = 22;
  EXPECT_GT(worst_norm_error(reference().first_gradients, train(other).first_gradients).first, 1e-3);
}

void expect_same_bits(const TrainingResult& a, const TrainingResult& b, const std::string& what) {
  EXPECT_EQ(a.losses, b.losses) << what;
  EXPECT_EQ(a.norms, b.norms) << what;
  for (const auto& [name, tensor] : a.final) EXPECT_TRUE(at::equal(tensor, b.final.at(name))) << what << ": " << name;
}

TEST(SameBits, TheSameLayoutTwiceAndWithoutOverlap) {
  for (TrainingSetup setup : variants()) {
    if (setup.layout.data == 1 && setup.layout.pipeline == 1) continue;
    setup.steps = 4;
    setup.precision = Precision::kBf16;
    const TrainingResult first = train(setup);
    ASSERT_TRUE(first.fine()) << first.messages[0];
    expect_same_bits(first, train(setup), setup.text());
    setup.overlap = false;
    expect_same_bits(first, train(setup), setup.text());
  }
}

TEST(SameBits, RecomputedActivations) {
  for (TrainingSetup setup : {setup_of(1, 1, 1), setup_of(2, 1, 1), setup_of(2, 2, 1)}) {
    for (const bool sequence_parallel : {false, true}) {
      if (sequence_parallel && setup.layout.tensor == 1) continue;
      setup.sequence_parallel = sequence_parallel;
      setup.steps = 3;
      setup.dropout = 0.1;
      setup.precision = Precision::kFp32;
      setup.recompute = "none";
      const TrainingResult kept = train(setup);
      ASSERT_TRUE(kept.fine()) << kept.messages[0];
      for (const char* recompute : {"selective", "layer"}) {
        setup.recompute = recompute;
        const TrainingResult again = train(setup);
        ASSERT_TRUE(again.fine()) << again.messages[0];
        expect_same_bits(kept, again, setup.text());
        for (const auto& [name, gradient] : kept.first_gradients) {
          EXPECT_TRUE(at::equal(gradient, again.first_gradients.at(name))) << setup.text() << ": " << name;
        }
      }
    }
  }
}

TEST(Zero, SharesTheStateOutEvenWhereSizesDoNotDivide) {
  for (const int data : {2, 3, 4}) {
    TrainingSetup setup = setup_of(1, 1, data);
    setup.batch_size = 24;
    setup.micro_batch = 1;
    const TrainingResult plain = train(setup);
    setup.zero = true;
    const TrainingResult shared = train(setup);
    ASSERT_TRUE(shared.fine()) << shared.messages[0];
    EXPECT_LE(worst_norm_error(plain.final, shared.final).first, 1e-9);
    EXPECT_LE(worst_norm_error(plain.states.at("exp_avg"), shared.states.at("exp_avg")).first, 1e-9);
    EXPECT_LE(worst_norm_error(plain.states.at("exp_avg_sq"), shared.states.at("exp_avg_sq")).first, 1e-9);
    for (const double bytes : shared.state_bytes) {
      EXPECT_NEAR(bytes, plain.state_bytes[0] / data, 0.02 * plain.state_bytes[0]) << data << " ranks";
    }
  }
}

// Masks of dropout are those of one rank, whole or in slices; and they matter.
TEST(Dropout, DropsTheSameInEveryLayout) {
  TrainingSetup one;
  one.dropout = 0.2;
  one.steps = 4;
  const TrainingResult expected = train(one);
  EXPECT_GT(worst_norm_error(reference().first_gradients, expected.first_gradients).first, 1e-2);
  for (TrainingSetup setup : variants()) {
    setup.dropout = 0.2;
    setup.steps = 4;
    const TrainingResult found = train(setup);
    ASSERT_TRUE(found.fine()) << found.messages[0];
    EXPECT_LE(worst_norm_error(expected.first_gradients, found.first_gradients).first, 1e-10) << setup.text();
    EXPECT_LE(worst_relative(expected.losses, found.losses), 1e-12) << setup.text();
  }
}

TEST(Dropout, KeepsTheExpectedShareAndScalesIt) {
  for (const double rate : {0.1, 0.5}) {
    const at::Tensor x = at::ones({64, 50}, at::kFloat);
    const DropoutSource source{rate, 3, 1, 0, 16};
    dropout_(x, source, 0, DropoutSite::kFfn, 0);
    const double kept = x.count_nonzero().item<double>() / 3200;
    EXPECT_NEAR(kept, 1 - rate, 5 * std::sqrt(rate * (1 - rate) / 3200));
    EXPECT_NEAR(x.max().item<double>(), 1 / (1 - rate), 1e-6);
    // Every part of the key changes the mask; the sample, not the row of the micro-batch, decides.
    const auto mask = [&](const DropoutSource& s, std::int64_t layer, DropoutSite site, std::int64_t first_row) {
      const at::Tensor y = at::ones({32, 50}, at::kFloat);
      dropout_(y, s, layer, site, first_row);
      return y;
    };
    const at::Tensor base = mask(source, 0, DropoutSite::kFfn, 0);
    EXPECT_TRUE(at::equal(base, x.narrow(0, 0, 32)));
    EXPECT_TRUE(at::equal(mask(source, 0, DropoutSite::kFfn, 16), x.narrow(0, 16, 32)));
    EXPECT_TRUE(at::equal(mask({rate, 3, 1, 2, 16}, 0, DropoutSite::kFfn, 0), x.narrow(0, 32, 32)));
    EXPECT_FALSE(at::equal(mask({rate, 4, 1, 0, 16}, 0, DropoutSite::kFfn, 0), base));
    EXPECT_FALSE(at::equal(mask({rate, 3, 2, 0, 16}, 0, DropoutSite::kFfn, 0), base));
    EXPECT_FALSE(at::equal(mask(source, 1, DropoutSite::kFfn, 0), base));
    EXPECT_FALSE(at::equal(mask(source, 0, DropoutSite::kAttention, 0), base));
  }
}

TEST(Replicas, AFlippedBitIsFoundAndNamed) {
  struct Row {
    TrainingSetup setup;
    int rank;
    const char* tensor;
    const char* expected;
  };
  TrainingSetup zero = setup_of(1, 1, 4);
  zero.zero = true;
  const Row rows[] = {
      {setup_of(1, 1, 4), 2, "encoder.layers.1.ffn.dense_out.weight", "rank 2 differs from ranks 0, 1, 3"},
      {zero, 3, "encoder.layers.1.ffn.dense_out.weight", "rank 3 differs from ranks 0, 1, 2"},
      {setup_of(4, 1, 1), 1, "encoder.layers.0.norm1.weight", "rank 1 differs from ranks 0, 2, 3"},
      {setup_of(1, 2, 1), 1, "encoder.embedding.word_embedding.weight", "ranks 0 and 1 differ"},
      {setup_of(2, 1, 2), 3, "encoder.layers.2.attn.dense.weight", "ranks 1 and 3 differ"},
  };
  for (const Row& row : rows) {
    TrainingSetup setup = row.setup;
    setup.steps = 1;
    std::mutex mutex;
    const std::vector<std::string> messages = run_ranks(setup.layout.world_size(), [&](Communicator& world) {
      Config config = training_config(setup);
      config = resolve_train_config(config, setup.layout);
      const Mesh mesh(world, setup.layout);
      ParameterStore store;
      const cram::Model model(config.model, store, make_placement(config, mesh), config.train.objective);
      store.allocate(Precision::kBf16, at::kCPU, state_layout(config.train.optimizer), partition_of(setup, mesh));
      store.initialize(1);
      check_replicas(store, mesh, 1);  // nothing to find
      if (world.rank() == row.rank) {
        auto* bits = static_cast<char*>(store.weight(store.find(row.tensor)).data_ptr());
        bits[5] = static_cast<char>(bits[5] ^ 1);
      }
      check_replicas(store, mesh, 7);
    });
    for (const std::string& message : messages) {
      EXPECT_NE(message.find("after step 7"), std::string::npos) << message;
      EXPECT_NE(message.find(row.tensor), std::string::npos) << message;
      EXPECT_NE(message.find(row.expected), std::string::npos) << message;
      EXPECT_NE(message.find("(1 tensors)"), std::string::npos) << message;
    }
  }
}

// Whatever the plan, all ranks hear of one rank's signal in the same batch and drop it; one that comes too late for
// that is heard after the update. A stage that waited for its answer at once would wait for ever.
TEST(Signals, OneRanksSignalStopsAllInTheSameBatch) {
  TrainingSetup gpipe = setup_of(1, 4, 1);
  gpipe.schedule = "gpipe";
  for (TrainingSetup setup : {setup_of(1, 1, 2), setup_of(2, 1, 1), setup_of(1, 2, 1), setup_of(1, 4, 1),
                              setup_of(2, 2, 2), setup_of(1, 2, 1, 2), setup_of(1, 2, 2, 2), gpipe}) {
    setup.micro_batch = 1;
    setup.steps = 2;
    const int ranks = setup.layout.world_size(), micro_batches = 24 / setup.layout.data;
    for (const int rank : {0, ranks - 1}) {
      for (const int look : {0, 3, micro_batches - 1, 2 * micro_batches}) {
        const std::string what = concat(setup.text(), ", rank ", rank, ", look ", look);
        setup.signal = [&](int r, int now) { return r == rank && now >= look ? SIGUSR1 : 0; };
        const TrainingResult found = train(setup);
        expect_fine(found, what);
        // (Two looks a micro-batch with GPipe; in the exchange once more; the second step begins anew.)
        const bool never = look > (setup.schedule == "gpipe" ? 2 * micro_batches : micro_batches);
        ASSERT_EQ(found.stopped.size(), never ? 0U : static_cast<std::size_t>(ranks)) << what;
        if (never) continue;
        const bool completed = found.stopped.at(0).first;
        for (const auto& [r, stop] : found.stopped) {
          EXPECT_EQ(stop.first, completed) << what << ", seen by " << r;
          EXPECT_EQ(stop.second, SIGUSR1) << what << ", seen by " << r;
        }
        EXPECT_TRUE(look > 3 || !completed) << what;
        EXPECT_EQ(worst_norm_error(found.initial, found.final).first == 0, !completed) << what;
      }
    }
  }
}

TEST(Pipelines, UnevenSplitsTrainEveryLayer) {
  for (const char* split : {"3,1", "1,3"}) {
    TrainingSetup setup = setup_of(1, 2, 1);
    setup.split = split;
    setup.steps = 2;
    const TrainingResult found = train(setup);
    ASSERT_TRUE(found.fine()) << found.messages[0];
    EXPECT_LE(worst_norm_error(reference().first_gradients, found.first_gradients).first, 1e-10) << split;
  }
  TrainingSetup three = setup_of(1, 3, 1);  // 4 layers on 3 stages
  three.steps = 2;
  EXPECT_LE(worst_norm_error(reference().first_gradients, train(three).first_gradients).first, 1e-10);
}

}  // namespace
}  // namespace cram::test
