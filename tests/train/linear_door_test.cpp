// A new linear structure is one row: y = (x A') B' of a low rank, made here in every tensor-parallel style and trained
// in layouts; and one that is not for tensor ranks.
#include <ATen/Parallel.h>

#include "model/linear.h"
#include "train/door_support.h"

namespace cram::test {
namespace {

constexpr std::int64_t kRank = 5;

// W = B A with B [out,5] and A [5,in]. Column: B's rows are cut, A is whole and its gradient this rank's part of a sum;
// row: A's columns are cut, and the same is true of B.
class LowRank final : public Linear {
 public:
  LowRank(const LinearSpec& spec, LinearStyle style, ParameterStore& store, const TensorRegion& tensor)
      : store_(store), style_(style), tensor_(tensor) {
    const bool several = tensor.size() > 1;
    // So that a weight has the standard deviation that was asked for.
    const double stddev = std::sqrt(spec.init_stddev / std::sqrt(static_cast<double>(kRank)));
    ParamSpec a{.name = spec.name + ".a", .global_shape = {kRank, spec.in}, .init_value = stddev};
    ParamSpec b{.name = spec.name + ".b", .global_shape = {spec.out, kRank}, .init_value = stddev};
    const auto cut = [&](ParamSpec& param, std::int64_t dim, std::int64_t groups) {
      param.slice_dim = dim;
      param.slice_groups = groups;
      const std::int64_t length = param.global_shape[static_cast<std::size_t>(dim)] / groups / tensor.size();
      param.slice_begin = length * tensor.rank();
      param.slice_end = param.slice_begin + length;
    };
    if (style == LinearStyle::kColumn) {
      cut(b, 0, spec.output_groups);
      a.traits.partial = several;
    } else if (style == LinearStyle::kRow) {
      cut(a, 1, 1);
      b.traits.partial = several;
    }
    a_ = store.add(std::move(a));
    b_ = store.add(std::move(b));
  }

  at::Tensor forward(const at::Tensor& x, Saved* saved) const override {
    const at::Tensor whole = style_ == LinearStyle::kColumn ? tensor_.enter(x) : x;
    const at::Tensor inner = at::mm(whole, store_.weight(a_).t());
    if (saved != nullptr) *saved = {whole, {inner}};
    const at::Tensor y = at::mm(inner, store_.weight(b_).t());
    return style_ == LinearStyle::kRow ? tensor_.leave_(y) : y;
  }

  at::Tensor backward(const at::Tensor& dy, const Saved& saved) const override {
    const at::Tensor whole = style_ == LinearStyle::kRow ? tensor_.leave_backward(dy) : dy;
    const at::Tensor d_inner = at::mm(whole, store_.weight(b_));
    accumulate_weight_grad(store_.grad(b_), whole, saved.more[0]);
    accumulate_weight_grad(store_.grad(a_), d_inner, saved.x);
    const at::Tensor dx = at::mm(d_inner, store_.weight(a_));
    return style_ == LinearStyle::kColumn ? tensor_.enter_backward_(dx).wait() : dx;
  }

  at::Tensor materialize() const override { return at::mm(store_.weight(b_), store_.weight(a_)); }

 private:
  const ParameterStore& store_;
  LinearStyle style_;
  TensorRegion tensor_;
  ParamId a_ = 0, b_ = 0;
};

template <LinearStyle style>
std::unique_ptr<Linear> make(const LinearSpec& spec, ParameterStore& store, const TensorRegion& tensor) {
  return std::make_unique<LowRank>(spec, style, store, tensor);
}

template <LinearStyle style>
std::unique_ptr<Linear> make_alone(const LinearSpec& spec, ParameterStore& store, const TensorRegion& tensor) {
  CRAM_CHECK(tensor.size() == 1, ExitCode::kUsage, spec.name,
             ": model.structure=low-rank-alone cannot be cut; expected parallel.tensor=1, got ", tensor.size());
  return make<style>(spec, store, tensor);
}

double flops(const LinearSpec& spec) { return 2 * kRank * static_cast<double>(spec.in + spec.out); }

class LinearDoor : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    at::set_num_threads(1);
    expect_legal_through_the_table("model.structure", "low-rank", [] {
      linear_structures().add(
          {"low-rank", make<LinearStyle::kReplicated>, make<LinearStyle::kColumn>, make<LinearStyle::kRow>, flops});
    });
    expect_legal_through_the_table("model.structure", "low-rank-alone", [] {
      linear_structures().add(
          {"low-rank-alone", nullptr, make_alone<LinearStyle::kColumn>, make_alone<LinearStyle::kRow>});
    });
  }
};

const std::vector<std::string> kOptions = {"model.structure=low-rank"};

TEST_F(LinearDoor, ForwardIsTheMaterialisedMatrix) {
  for (const LinearStyle style : {LinearStyle::kReplicated, LinearStyle::kColumn, LinearStyle::kRow}) {
    ParameterStore store;
    const auto layer = make_linear("low-rank", style, {"x", 12, 20, 0.5}, store, self_group());
    store.allocate(Precision::kFp64, at::kCPU);
    store.initialize(3);
    EXPECT_EQ(store.size(), 2U);
    EXPECT_EQ(store.local_numel(0) + store.local_numel(1), kRank * (12 + 20));
    const at::Tensor x = at::randn({7, 12}, at::detail::createCPUGenerator(1), at::kDouble);
    EXPECT_LE(relative_error(layer->forward(x, nullptr), at::mm(x, layer->materialize().t())), 1e-14);
  }
}

TEST_F(LinearDoor, GradientsAgreeWithFiniteDifferences) {
  ModelConfig config = model_of(2, 8, 2, 12, 23, 6);
  config.structure = "low-rank";
  expect_gradients_are_differences(config, "mlm", Rows::batch(config, 1, 3));
}

TEST_F(LinearDoor, TrainsInEveryLayoutAsOnOneRank) {
  std::vector<TrainingSetup> setups;
  for (const auto& [layout, sequence_parallel] : {std::pair{Layout{1, 1, 1}, false},
                                                  {Layout{2, 1, 1}, false},
                                                  {Layout{2, 1, 1}, true},
                                                  {Layout{1, 2, 1}, false},
                                                  {Layout{1, 1, 2}, false},
                                                  {Layout{2, 2, 1}, true}}) {
    setups.push_back(door_setup(kOptions, layout, sequence_parallel));
    setups.back().zero = layout.data > 1;
  }
  const TrainingResult one = expect_like_one_rank(setups);
  for (const char* name : {"attn.self_attention.query_key_value", "attn.dense", "ffn.dense_in", "ffn.dense_out"}) {
    for (const char* factor : {".a", ".b"}) {
      const std::string full = concat("encoder.layers.1.", name, factor);
      EXPECT_FALSE(at::equal(one.initial.at(full), one.final.at(full))) << full;
    }
  }
}

// Fewer parameters and operations than a dense model of its shape has, in counts and in plans.
TEST_F(LinearDoor, ParametersAndOperationsAreCountedAsTheyAre) {
  ModelConfig config = model_of(2, 16, 2, 24, 37, 8);
  const std::int64_t dense = parameter_count(config);
  config.structure = "low-rank";
  const auto saved = [](std::int64_t in, std::int64_t out) { return in * out - kRank * (in + out); };
  const std::int64_t fewer = 2 * (saved(16, 48) + saved(16, 16) + saved(16, 24) + saved(12, 16));
  EXPECT_EQ(dense - parameter_count(config), fewer);
  // Each of these weights is multiplied twice a token, forward, and three times as often with the backward pass.
  ModelConfig plain = config;
  plain.structure = "dense";
  const double fewer_flops = 6 * static_cast<double>(fewer);
  EXPECT_EQ(train_flops_per_token(plain, 2) - train_flops_per_token(config, 2), fewer_flops);
  const TrainingSetup low_rank = door_setup(kOptions), full = door_setup({});
  const auto planned = [](const TrainingSetup& setup) {
    return plan_run(training_config(setup), setup.layout, setup.batch_size, 2).stages[0].flops_per_step;
  };
  EXPECT_EQ(planned(full) - planned(low_rank), fewer_flops * static_cast<double>(full.batch_size * 8));
}

TEST_F(LinearDoor, AStructureThatCannotBeCutSaysSo) {
  const TrainingResult alone = train(door_setup({"model.structure=low-rank-alone"}));
  EXPECT_TRUE(alone.fine()) << alone.messages[0];
  const TrainingResult cut = train(door_setup({"model.structure=low-rank-alone"}, {2, 1, 1}));
  for (const std::string& message : cut.messages) {
    EXPECT_NE(message.find("cannot be cut; expected parallel.tensor=1, got 2"), std::string::npos) << message;
  }
}

}  // namespace
}  // namespace cram::test
