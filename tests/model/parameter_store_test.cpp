// Shapes, counts, initial values and buffers of the parameters.
#include "model/parameter_store.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cmath>
#include <set>

#include "support/expect_error.h"
#include "support/golden.h"

namespace cram {
namespace {

using test::expect_error;
using test::Model;

ModelConfig small_config() { return test::model_of(3, 48, 4, 64, 101, 16); }

TEST(ModelConfig, CountsOfTheRecipe) {
  ModelConfig config;
  config.vocab_size = 32768;
  config.seq_length = 128;
  EXPECT_EQ(parameter_count(config), 119'589'889);
  EXPECT_EQ(train_flops_per_token(config, 32), 622'854'144.0);
  EXPECT_EQ(config.head_dim(), 64);
}

TEST(ModelConfig, CountEqualsWhatTheModelRegisters) {
  for (const std::int64_t layers : {1, 2, 5}) {
    ModelConfig config = small_config();
    config.layers = layers;
    ParameterStore store;
    const cram::Model model(config, store);
    std::int64_t sum = 0;
    for (ParamId id = 0; id < store.size(); ++id) sum += store.local_numel(id);
    EXPECT_EQ(sum, parameter_count(config));
  }
}

TEST(ModelConfig, FlopsGrowWithEveryPart) {
  ModelConfig config = small_config();
  const double base = train_flops_per_token(config, 4);
  // Twelve layers' worth of linears is 2 x weights x 3; the decoder works on a quarter of the positions.
  const double linears = 3.0 * (4 * 48 * 48 + 1.5 * 48 * 64), attention = 3.0 * 2 * 16 * 48,
               decoder = 101.0 * 48 * 4 / 16;
  EXPECT_NEAR(base, 6 * (linears + attention + decoder), 1e-6);
}

TEST(ModelConfig, RefusesWhatCannotBe) {
  struct Bad {
    const char* word;
    void (*change)(ModelConfig&);
  };
  const Bad cases[] = {
      {"model.heads=5", [](ModelConfig& c) { c.heads = 5; }},
      {"model.heads=0", [](ModelConfig& c) { c.heads = 0; }},
      {"model.heads=-4", [](ModelConfig& c) { c.heads = -4; }},
      {"model.layers=0", [](ModelConfig& c) { c.layers = 0; }},
      {"model.hidden=0", [](ModelConfig& c) { c.hidden = 0; }},
      {"model.hidden=15", [](ModelConfig& c) { c.hidden = 15, c.heads = 3; }},
      {"model.ffn=63", [](ModelConfig& c) { c.ffn = 63; }},
      {"model.ffn=0", [](ModelConfig& c) { c.ffn = 0; }},
      {"model.vocab_size=5", [](ModelConfig& c) { c.vocab_size = 5; }},
      {"model.seq_length=0", [](ModelConfig& c) { c.seq_length = 0; }},
  };
  EXPECT_NO_THROW(check_model_config(small_config()));
  for (const Bad& bad : cases) {
    ModelConfig config = small_config();
    bad.change(config);
    expect_error(
        ExitCode::kUsage, {bad.word}, [&] { check_model_config(config); }, bad.word);
  }
}

TEST(Encoder, HasThePublicNamesShapesAndClasses) {
  Model model(small_config(), Precision::kBf16);
  std::map<std::string, std::vector<std::int64_t>> expected = {
      {"encoder.embedding.word_embedding.weight", {101, 48}},
      {"encoder.embedding.pos_embedding.scale_factor", {1}},
      {"encoder.embedding.norm.weight", {48}},
      {"encoder.embedding.norm.bias", {48}},
      {"encoder.final_norm.weight", {48}},
      {"encoder.final_norm.bias", {48}},
  };
  for (int i = 0; i < 3; ++i) {
    const std::string layer = concat("encoder.layers.", i, ".");
    for (const char* norm : {"norm1", "norm2"}) {
      expected[layer + norm + ".weight"] = {48};
      expected[layer + norm + ".bias"] = {48};
    }
    expected[layer + "attn.self_attention.query_key_value.weight"] = {144, 48};
    expected[layer + "attn.dense.weight"] = {48, 48};
    expected[layer + "ffn.dense_in.weight"] = {64, 48};
    expected[layer + "ffn.dense_out.weight"] = {48, 32};
  }
  ASSERT_EQ(model.store.size(), expected.size());
  for (ParamId id = 0; id < model.store.size(); ++id) {
    const ParamSpec& spec = model.store.spec(id);
    ASSERT_TRUE(expected.count(spec.name)) << spec.name;
    EXPECT_EQ(spec.global_shape, expected[spec.name]) << spec.name;
    const bool is_norm = spec.name.find("norm") != std::string::npos;
    EXPECT_EQ(spec.traits.decay, !is_norm) << spec.name << " (the position scale decays, norms and biases do not)";
    EXPECT_EQ(spec.traits.full_precision, is_norm || spec.name.find("scale_factor") != std::string::npos) << spec.name;
  }
}

TEST(InitialValues, HaveTheRecipesDistributions) {
  Model model(small_config(), Precision::kFp64);
  for (ParamId id = 0; id < model.store.size(); ++id) {
    const std::string& name = model.store.spec(id).name;
    const at::Tensor& value = model.store.master(id);
    const double n = static_cast<double>(value.numel());
    if (name.find("scale_factor") != std::string::npos) {
      EXPECT_EQ(value.item<double>(), 1 / std::sqrt(48.0));
    } else if (name.find("norm") != std::string::npos) {
      EXPECT_TRUE(value.eq(name.find("bias") == std::string::npos ? 1 : 0).all().item<bool>()) << name;
    } else {
      EXPECT_NEAR(value.std().item<double>() / 0.02, 1, 6 / std::sqrt(2 * n)) << name;
      EXPECT_NEAR(value.mean().item<double>(), 0, 6 * 0.02 / std::sqrt(n)) << name;
    }
  }
  // The pad row is like every row.
  EXPECT_GT(
      model.store.master(model.store.find("encoder.embedding.word_embedding.weight"))[0].abs().max().item<double>(), 0);
}

TEST(InitialValues, DependOnSeedAndNameOnly) {
  ParameterStore a, b;
  const auto spec = [](const char* name) { return ParamSpec{.name = name, .global_shape = {6, 4}, .init_value = 1.0}; };
  a.add(spec("x"));
  a.add(spec("y"));
  b.add(spec("y"));
  b.add(spec("other"));
  b.add(spec("x"));
  for (ParameterStore* store : {&a, &b}) {
    store->allocate(Precision::kFp64, at::kCPU);
    store->initialize(5);
  }
  for (const char* name : {"x", "y"}) EXPECT_TRUE(a.master(a.find(name)).equal(b.master(b.find(name)))) << name;
  EXPECT_FALSE(a.master(0).equal(a.master(1)));
  const at::Tensor before = a.master(0).clone();
  a.initialize(6);
  EXPECT_FALSE(a.master(0).equal(before));
  a.initialize(5);
  EXPECT_TRUE(a.master(0).equal(before));
}

TEST(InitialValues, ASliceEqualsTheSliceOfTheWhole) {
  ParameterStore whole;
  whole.add({.name = "x", .global_shape = {10, 7}, .init_value = 1.0});
  whole.allocate(Precision::kFp64, at::kCPU);
  whole.initialize(5);
  for (std::int64_t dim = 0; dim < 2; ++dim) {
    for (const auto& [begin, end] : {std::pair<std::int64_t, std::int64_t>{0, 3}, {3, 7}, {6, 7}}) {
      ParameterStore part;
      part.add({.name = "x",
                .global_shape = {10, 7},
                .init_value = 1.0,
                .slice_dim = dim,
                .slice_begin = begin,
                .slice_end = end});
      part.allocate(Precision::kFp64, at::kCPU);
      part.initialize(5);
      EXPECT_EQ(part.local_numel(0), (end - begin) * (dim == 0 ? 7 : 10));
      EXPECT_TRUE(part.master(0).equal(whole.master(0).slice(dim, begin, end))) << dim << " " << begin;
    }
  }
}

TEST(InitialValues, DoNotDependOnTheThreadCount) {
  const int threads = at::get_num_threads();
  at::Tensor first;
  for (const int count : {1, 2, 3}) {
    at::set_num_threads(count);
    ParameterStore store;
    store.add({.name = "x", .global_shape = {1031, 257}, .init_value = 0.02});
    store.allocate(Precision::kFp32, at::kCPU);
    store.initialize(5);
    if (!first.defined()) first = store.master(0).clone();
    EXPECT_TRUE(store.master(0).equal(first)) << count << " threads";
  }
  at::set_num_threads(threads);
}

TEST(InitialValues, AreRoundedOnceForEveryPrecision) {
  Model exact(small_config(), Precision::kFp64), fp32(small_config(), Precision::kFp32),
      bf16(small_config(), Precision::kBf16);
  for (ParamId id = 0; id < exact.store.size(); ++id) {
    EXPECT_TRUE(fp32.store.master(id).equal(exact.store.master(id).to(at::kFloat)));
    EXPECT_TRUE(bf16.store.master(id).equal(fp32.store.master(id)));
    const bool full = bf16.store.spec(id).traits.full_precision;
    EXPECT_EQ(bf16.store.weight(id).scalar_type(), full ? at::kFloat : at::kBFloat16);
    EXPECT_TRUE(bf16.store.weight(id).equal(bf16.store.master(id).to(bf16.store.weight(id).scalar_type())));
    EXPECT_EQ(fp32.store.weight(id).data_ptr(), fp32.store.master(id).data_ptr()) << "one copy in one format";
    EXPECT_EQ(exact.store.weight(id).data_ptr(), exact.store.master(id).data_ptr());
  }
}

TEST(Buffers, AreViewsByClassWithZeroPadding) {
  Model model(small_config(), Precision::kBf16);
  std::set<std::pair<bool, bool>> classes;
  for (const FlatBuffers& b : model.store.buffers()) {
    EXPECT_TRUE(classes.insert({b.traits.decay, b.traits.full_precision}).second);
    EXPECT_EQ(b.numel % kParamAlignment, 0);
    for (const at::Tensor* t : {&b.working, &b.master, &b.grad, &b.states[0].tensor, &b.states[1].tensor})
      EXPECT_EQ(t->numel(), b.numel);
  }
  // Views cover the buffers without overlap: fill each with its number, sum over views equals sum over buffers.
  double views = 0, flats = 0;
  for (ParamId id = 0; id < model.store.size(); ++id) {
    model.store.grad(id).fill_(static_cast<double>(id + 1));
    views += static_cast<double>(id + 1) * static_cast<double>(model.store.local_numel(id));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(model.store.grad(id).data_ptr()) % 16, 0U);
  }
  for (const FlatBuffers& b : model.store.buffers()) flats += b.grad.sum(at::kDouble).item<double>();
  EXPECT_EQ(views, flats);
  model.store.zero_grad();
  for (const FlatBuffers& b : model.store.buffers()) EXPECT_EQ(b.grad.abs().max().item<float>(), 0);
}

TEST(Buffers, WithoutAnOptimizerHaveWeightsOnly) {
  ParameterStore store;
  const cram::Model model(small_config(), store);
  store.allocate(Precision::kBf16, at::kCPU);
  store.initialize(0);
  EXPECT_TRUE(store.master(0).defined());
  EXPECT_TRUE(store.weight(0).defined());
  EXPECT_FALSE(store.grad(0).defined());
  EXPECT_FALSE(store.state(0, "exp_avg").defined());
}

TEST(ParameterStore, UnknownNamesAreAnError) {
  Model model(small_config(), Precision::kFp32);
  EXPECT_FALSE(model.store.has("encoder.nothing"));
  expect_error(ExitCode::kUsage, {"encoder.nothing"}, [&] { (void)model.store.find("encoder.nothing"); });
}

TEST(Precisions, ParseAndName) {
  for (const Precision precision : {Precision::kBf16, Precision::kFp32, Precision::kFp64}) {
    EXPECT_EQ(parse_precision(precision_name(precision)), precision);
  }
  expect_error(ExitCode::kUsage, {"fp8", "bf16, fp32, fp64"}, [] { (void)parse_precision("fp8"); });
  EXPECT_EQ(working_type(Precision::kBf16), at::kBFloat16);
  EXPECT_EQ(master_type(Precision::kBf16), at::kFloat);
  EXPECT_EQ(working_type(Precision::kFp64), at::kDouble);
}

// bf16 keeps the upper 16 bits of fp32, rounded to nearest even.
TEST(RefreshWorking, RoundsToNearestEven) {
  ParameterStore store;
  store.add({.name = "x", .global_shape = {6}});
  store.allocate(Precision::kBf16, at::kCPU);
  // 1 + k/256 is halfway for odd k between multiples of 2^-7.
  store.master(0).copy_(at::tensor({1 + 0x1p-8, 1 + 3 * 0x1p-8, 1 + 0x1p-8 + 0x1p-20, -1 - 0x1p-8, 3.4e38, 0x1p-140}));
  store.refresh_working();
  const at::Tensor expected =
      at::tensor({1.0, 1 + 0x1p-6, 1 + 0x1p-7, -1.0, static_cast<double>(INFINITY), 0x1p-133 * 0}, at::kDouble);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(store.weight(0)[i].item<double>(), expected[i].item<double>()) << i;
}

}  // namespace
}  // namespace cram
