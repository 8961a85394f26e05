// A new position form is one row: a learned vector a position, and none at all, made here and trained in layouts.
#include <ATen/Parallel.h>

#include "model/positions.h"
#include "train/door_support.h"

namespace cram::test {
namespace {

class LearnedPositions final : public PositionForm {
 public:
  LearnedPositions(const ModelConfig& config, ParameterStore& store, const TensorRegion& tensor)
      : hidden_(config.hidden),
        store_(store),
        tensor_(tensor),
        table_(store.add({.name = "encoder.embedding.pos_embedding.weight",
                          .global_shape = {config.seq_length, config.hidden},
                          .init = InitRule::kNormal,
                          .init_value = 0.02,
                          .traits = {.full_precision = true, .partial = tensor.sequence_parallel()}})) {}

  at::Tensor added(std::int64_t batch, std::int64_t seq) override {
    const at::Tensor& table = store_.weight(table_);
    return tensor_.sequence_parallel() ? at::index_select(table, 0, positions(batch, seq)) : table.narrow(0, 0, seq);
  }

  void added_backward(const at::Tensor& d_sum, std::int64_t batch, std::int64_t seq) override {
    const at::Tensor grad = store_.grad(table_);
    const at::Tensor wide = d_sum.to(grad.scalar_type());
    if (tensor_.sequence_parallel()) {
      grad.index_add_(0, positions(batch, seq), wide);
    } else {
      grad.narrow(0, 0, seq).add_(wide.view({batch, seq, hidden_}).sum(0));
    }
  }

 private:
  // Of this rank's rows.
  [[nodiscard]] at::Tensor positions(std::int64_t batch, std::int64_t seq) const {
    const std::int64_t held = tensor_.rows_held(batch * seq), first = tensor_.first_row(held);
    return at::arange(first, first + held, at::kLong).remainder_(seq);
  }

  std::int64_t hidden_;
  const ParameterStore& store_;
  TensorRegion tensor_;
  ParamId table_;
};

class NoPositions final : public PositionForm {
 public:
  NoPositions(const ModelConfig& /*config*/, ParameterStore& /*store*/, const TensorRegion& /*tensor*/) {}
  at::Tensor added(std::int64_t /*batch*/, std::int64_t /*seq*/) override { return {}; }
  void added_backward(const at::Tensor& /*d_sum*/, std::int64_t /*batch*/, std::int64_t /*seq*/) override {}
};

template <class Form>
std::unique_ptr<PositionForm> make(const ModelConfig& config, ParameterStore& store, const TensorRegion& tensor) {
  return std::make_unique<Form>(config, store, tensor);
}

class PositionDoor : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    at::set_num_threads(1);
    expect_legal_through_the_table("model.positions", "learned", [] {
      position_forms().add({"learned", make<LearnedPositions>, [](const ModelConfig& config) {
                              CRAM_CHECK(config.seq_length <= 512, ExitCode::kUsage, "512 positions at most");
                            }});
    });
    expect_legal_through_the_table("model.positions", "none", [] {
      position_forms().add({"none", make<NoPositions>});
    });
  }
};

const std::vector<std::string> kNames = {"learned", "none"};

TEST_F(PositionDoor, GradientsAgreeWithFiniteDifferences) {
  for (const std::string& name : kNames) {
    SCOPED_TRACE(name);
    ModelConfig config = model_of(2, 8, 2, 12, 23, 6);
    config.positions = name;
    Batch batch = Rows::batch(config, 1, 3);
    expect_gradients_are_differences(config, "mlm", batch);
    batch.set(field::kLengths, at::tensor({6, 5, 6}, at::kLong));
    expect_gradients_are_differences(config, "mlm", batch);
  }
}

TEST_F(PositionDoor, TrainsInEveryLayoutAsOnOneRank) {
  for (const std::string& name : kNames) {
    SCOPED_TRACE(name);
    std::vector<TrainingSetup> setups;
    for (const auto& [layout, sequence_parallel] : {std::pair{Layout{1, 1, 1}, false},
                                                    {Layout{2, 1, 1}, false},
                                                    {Layout{2, 1, 1}, true},
                                                    {Layout{1, 2, 1}, false},
                                                    {Layout{1, 1, 2}, false},
                                                    {Layout{2, 2, 1}, true}}) {
      setups.push_back(door_setup({"model.positions=" + name}, layout, sequence_parallel));
      setups.back().zero = layout.data > 1;
    }
    const TrainingResult one = expect_like_one_rank(setups);
    EXPECT_EQ(one.final.count("encoder.embedding.pos_embedding.scale_factor"), 0U);
    EXPECT_EQ(one.final.count("encoder.embedding.pos_embedding.weight"), name == "learned" ? 1U : 0U);
  }
}

// What a form is for: a row read backwards has the same states, backwards, unless positions tell.
TEST_F(PositionDoor, ModelsKnowOrderThroughTheirFormAlone) {
  for (const std::string& name : {std::string("sinusoidal"), kNames[0], kNames[1]}) {
    ModelConfig config = model_of(2, 16, 2, 24, 37, 8);
    config.positions = name;
    Model model(config, Precision::kFp64);
    const at::Tensor ids = at::arange(8, at::kLong).mul(5).remainder(37).view({1, 8});
    const double error = relative_error(model.hidden(ids.flip({1})).flip({1}), model.hidden(ids));
    if (name == "none")
      EXPECT_LE(error, 1e-12);
    else
      EXPECT_GE(error, 1e-3) << name;
  }
}

// Limits of a form are its own: an odd width is refused for sines and cosines only.
TEST_F(PositionDoor, AFormChecksWhatItCanDo) {
  ModelConfig config = model_of(1, 15, 3, 24, 37, 8);
  expect_error(ExitCode::kUsage, {"model.hidden=15", "must be even"}, [&] { check_model_config(config); });
  for (const std::string& name : kNames) {
    config.positions = name;
    check_model_config(config);
    Model model(config, Precision::kFp64);
    EXPECT_TRUE(model.hidden(at::zeros({2, 8}, at::kLong)).isfinite().all().item<bool>());
  }
  config.positions = "learned";
  config.seq_length = 513;
  expect_error(ExitCode::kUsage, {"512 positions at most"}, [&] { check_model_config(config); });
}

}  // namespace
}  // namespace cram::test
