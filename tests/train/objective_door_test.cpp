// A new objective is one row: two of them, a classification of rows and a regression of every token, made here with
// their own head, loss and fields, and trained as masked tokens are.
#include <ATen/Parallel.h>

#include "eval/loaded_model.h"
#include "support/temporary_folder.h"
#include "train/door_support.h"
#include "train/forward_pass.h"

namespace cram::test {
namespace {

constexpr std::string_view kClasses = "classes";  // [B] of a row
constexpr std::string_view kValues = "values";    // [B*S] of every token
constexpr std::int64_t kClassCount = 3;

// outputs = x W' + b; the loss is half the squared distance to what they should be.
class SquaredError : public Objective {
 public:
  SquaredError(const ObjectiveContext& context, const std::string& name, std::int64_t outputs)
      : store_(context.store),
        weight_(context.store.add({.name = name + ".weight",
                                   .global_shape = {outputs, context.config.hidden},
                                   .init = InitRule::kNormal,
                                   .init_value = 0.3})),
        bias_(context.store.add({.name = name + ".bias",
                                 .global_shape = {outputs},
                                 .init = InitRule::kConstant,
                                 .init_value = 0.1,
                                 .traits = {.decay = false, .full_precision = true}})) {}

  at::Tensor forward(const at::Tensor& hidden, const Batch& batch, Saved& saved) const override {
    const at::Tensor error = outputs(hidden) - targets(batch);
    saved.hidden = hidden;
    saved.more = {error};
    return error.square().sum().mul(0.5).to(at::kDouble);
  }
  at::Tensor backward(const Batch& /*batch*/, Saved& saved) const override {
    const at::Tensor error = saved.more[0];
    store_.grad(weight_).add_(at::mm(error.t(), saved.hidden));
    store_.grad(bias_).add_(error.sum(0));
    saved = {};
    return at::mm(error, store_.weight(weight_));
  }
  Evaluation evaluate(const at::Tensor& hidden, const Batch& batch) const override {
    const at::Tensor made = outputs(hidden), wanted = targets(batch);
    return {(made - wanted).square().sum().mul(0.5).to(at::kDouble), made.argmax(1).eq(wanted.argmax(1)).sum()};
  }
  at::Tensor outputs(const at::Tensor& hidden) const override {
    return at::mm(hidden, store_.weight(weight_).t()) + store_.weight(bias_);
  }

 protected:
  [[nodiscard]] virtual at::Tensor targets(const Batch& batch) const = 0;  // [M,outputs]

 private:
  const ParameterStore& store_;
  ParamId weight_, bias_;
};

class RowClass final : public SquaredError {
 public:
  explicit RowClass(const ObjectiveContext& context) : SquaredError(context, "classifier", kClassCount) {}
  std::vector<std::string_view> fields() const override { return {kClasses}; }
  at::Tensor rows(const Batch& batch) const override {
    return at::arange(0, batch.tokens(), batch.seq_length, at::kLong);
  }
  std::int64_t count(const Batch& batch) const override { return batch.rows; }

 private:
  at::Tensor targets(const Batch& batch) const override {
    return at::one_hot(batch[kClasses], kClassCount).to(at::kDouble);
  }
};

class TokenValue final : public SquaredError {
 public:
  explicit TokenValue(const ObjectiveContext& context) : SquaredError(context, "regression", 1) {}
  std::vector<std::string_view> fields() const override { return {kValues}; }
  at::Tensor rows(const Batch& /*batch*/) const override { return {}; }  // all
  std::int64_t count(const Batch& batch) const override { return batch.tokens(); }

 private:
  at::Tensor targets(const Batch& batch) const override { return batch[kValues].to(at::kDouble).unsqueeze(1); }
};

template <class Made>
std::unique_ptr<Objective> make(const ObjectiveContext& context) {
  return std::make_unique<Made>(context);
}

class ObjectiveDoor : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    at::set_num_threads(1);
    expect_legal_through_the_table("train.objective", "row-class", [] {
      objectives().add({"row-class", make<RowClass>, [](const ModelConfig& config) {
                          return 2.0 * static_cast<double>(config.hidden * kClassCount);
                        }});
    });
    expect_legal_through_the_table("train.objective", "token-value", [] {
      objectives().add({"token-value", make<TokenValue>});
    });
  }
};

// Rows with what both objectives want, and nothing that masked tokens do.
Batch rows_of(const ModelConfig& model, std::int64_t first, std::int64_t rows) {
  const at::Tensor ids = Rows::batch(model, first, rows)[field::kIds];
  Batch batch(rows, model.seq_length, {{std::string(field::kIds), ids}});
  batch.set(kClasses, ids.select(1, 0).remainder(kClassCount));
  batch.set(kValues, ids.view({-1}).remainder(2));
  return batch;
}

const std::vector<std::string> kNames = {"row-class", "token-value"};

TEST_F(ObjectiveDoor, GradientsAgreeWithFiniteDifferences) {
  const ModelConfig config = model_of(2, 8, 2, 12, 23, 6);
  for (const std::string& name : kNames) {
    SCOPED_TRACE(name);
    Batch batch = rows_of(config, 0, 3);
    expect_gradients_are_differences(config, name, batch);
    batch.set(field::kLengths, at::tensor({6, 2, 1}, at::kLong));
    expect_gradients_are_differences(config, name, batch);
  }
}

TEST_F(ObjectiveDoor, TrainsInEveryLayoutAsOnOneRank) {
  for (const std::string& name : kNames) {
    SCOPED_TRACE(name);
    std::vector<TrainingSetup> setups;
    for (const auto& [layout, sequence_parallel] : {std::pair{Layout{1, 1, 1}, false},
                                                    {Layout{2, 1, 1}, false},
                                                    {Layout{2, 1, 1}, true},
                                                    {Layout{1, 2, 1}, false},
                                                    {Layout{1, 1, 2}, false},
                                                    {Layout{2, 2, 1}, true}}) {
      setups.push_back(door_setup({"train.objective=" + name}, layout, sequence_parallel));
      setups.back().rows = rows_of;
      setups.back().zero = layout.data > 1;
    }
    const TrainingResult one = expect_like_one_rank(setups);
    // The head is trained, by its own loss.
    const std::string weight = name == "row-class" ? "classifier.weight" : "regression.weight";
    EXPECT_FALSE(at::equal(one.initial.at(weight), one.final.at(weight)));
  }
}

// Loss and gradients of a step are those of the mean over the objective's own terms.
TEST_F(ObjectiveDoor, LossIsTheMeanOverItsTerms) {
  for (const std::string& name : kNames) {
    TrainingSetup setup = door_setup({"train.objective=" + name});
    setup.steps = 1;
    setup.rows = rows_of;
    const TrainingResult result = train(setup);
    ASSERT_TRUE(result.fine()) << result.messages[0];
    ParameterStore store;
    cram::Model model(setup.model, store, name);
    store.allocate(Precision::kFp64, at::kCPU, adam_states());
    store.initialize(11);
    const Batch all = rows_of(setup.model, 0, setup.batch_size);
    const double sum = forward_backward(model, all).item<double>();
    const double terms = static_cast<double>(name == "row-class" ? all.rows : all.tokens());
    EXPECT_NEAR(result.losses[0] / (sum / terms), 1, 1e-12) << name;
  }
}

// A plan counts the head's own operations: one term a row of three classes, or none that are worth it.
TEST_F(ObjectiveDoor, OperationsAreThoseOfTheHead) {
  const auto planned = [](const std::string& name, std::int64_t terms) {
    const TrainingSetup setup = door_setup({"train.objective=" + name}, {1, 2, 1});
    const RunPlanned plan = plan_run(training_config(setup), setup.layout, setup.batch_size, terms);
    return plan.stages[1].flops_per_step - plan.stages[0].flops_per_step;  // a layer each, and the head
  };
  EXPECT_EQ(planned("row-class", 1), 3 * 2 * 16 * kClassCount * 12);
  EXPECT_EQ(planned("token-value", 8), 0);
  EXPECT_EQ(planned("mlm", 2), 3 * 2 * 16 * 37 * 2 * 12);
}

// What a checkpoint says is enough to build the model again, head and all.
TEST_F(ObjectiveDoor, ACheckpointIsLoadedWithItsHead) {
  for (const std::string& name : kNames) {
    const TemporaryFolder root;
    TrainingSetup setup = door_setup({"train.objective=" + name}, {1, 2, 1});
    setup.rows = rows_of;
    setup.finish = [&](const ParameterStore& store, const Mesh& mesh) {
      OptionTable table;
      Config config = training_config(setup);
      add_train_options(table, config);
      CheckpointInfo info;
      info.progress.step = 2;
      info.settings = table.values();
      CheckpointFolder(root / "checkpoints").save(store, info, 1, mesh.world(), /*writes=*/true);
    };
    const TrainingResult trained = train(setup);
    ASSERT_TRUE(trained.fine()) << trained.messages[0] << trained.messages[1];
    const at::NoGradGuard no_grad;
    LoadedModel loaded = load_model(root / "checkpoints/step-000000002", Precision::kFp64, at::kCPU);
    for (ParamId id = 0; id < loaded.store->size(); ++id) {
      EXPECT_TRUE(at::equal(loaded.store->weight(id), trained.final.at(loaded.store->spec(id).name)));
    }
    const Batch batch = rows_of(setup.model, 0, 2);
    ForwardPass pass(*loaded.model, *loaded.store, self_group());
    EXPECT_EQ(pass.outputs(batch[field::kIds], at::tensor({0, 8}, at::kLong)).size(1),
              name == "row-class" ? kClassCount : 1);
    EXPECT_GT(pass.evaluate(batch).loss_sum.item<double>(), 0);
  }
}

// A batch without the objective's fields is said, not read past.
TEST_F(ObjectiveDoor, AMissingFieldIsNamed) {
  TrainingSetup setup = door_setup({"train.objective=row-class"});
  setup.rows = [](const ModelConfig& model, std::int64_t first, std::int64_t rows) {
    return Batch(rows, model.seq_length, {{std::string(field::kIds), Rows::batch(model, first, rows)[field::kIds]}});
  };
  const TrainingResult result = train(setup);
  EXPECT_NE(result.messages[0].find("no field classes, it has: ids"), std::string::npos) << result.messages[0];
}

}  // namespace
}  // namespace cram::test
