#include "model/weights_io.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/file_io.h"
#include "support/expect_error.h"
#include "support/golden.h"
#include "support/temporary_folder.h"

namespace cram {
namespace {

using test::expect_error;
using test::Golden;
using test::Model;
using test::TemporaryFolder;

constexpr const char* kEmbedding = "encoder.embedding.word_embedding.weight";
constexpr const char* kFactor = "encoder.layers.1.attn.self_attention.norm_factor";

ModelConfig small_config() { return test::model_of(2, 32, 2, 48, 37, 8); }

using Tensors = std::map<std::string, at::Tensor>;

void write_tensors(const std::string& path, const Tensors& tensors) {
  std::vector<SafetensorsItem> items;
  Tensors kept;
  for (const auto& [name, tensor] : tensors) {
    kept[name] = tensor.contiguous();
    const at::ScalarType type = tensor.scalar_type();
    const char* dtype = type == at::kDouble  ? "F64"
                        : type == at::kFloat ? "F32"
                        : type == at::kHalf  ? "F16"
                        : type == at::kLong  ? "I64"
                                             : "BF16";
    items.push_back({name, dtype, tensor.sizes().vec(), kept[name].const_data_ptr()});
  }
  write_safetensors(path, items, {});
}

// What a file of the model with seed 1 holds, to be changed by the tests.
Tensors model_tensors(at::ScalarType type = at::kFloat) {
  Model model(small_config(), Precision::kFp64);
  model.store.initialize(1);
  Tensors tensors;
  for (ParamId id = 0; id < model.store.size(); ++id)
    tensors[model.store.spec(id).name] = model.store.master(id).to(type, false, true);
  return tensors;
}

TEST(ExportWeights, WritesThePublicNamesInF32) {
  const TemporaryFolder folder;
  for (const Precision precision : {Precision::kFp32, Precision::kFp64, Precision::kBf16}) {
    Model model(small_config(), precision);
    const std::string path = folder / precision_name(precision);
    export_weights(path, small_config(), model.store);
    const SafetensorsFile file = SafetensorsFile::open(path);
    EXPECT_EQ(file.metadata(), (std::map<std::string, std::string>{{"format", "pt"}, {"seq_length", "8"}}));
    EXPECT_EQ(file.entries().size(), model.store.size() + 2) << "one norm_factor a layer, no decoder.weight";
    EXPECT_EQ(file.find("decoder.weight"), nullptr);
    const Tensors tensors = test::read_tensors(file);
    for (ParamId id = 0; id < model.store.size(); ++id) {
      const std::string& name = model.store.spec(id).name;
      ASSERT_TRUE(tensors.count(name)) << name;
      EXPECT_EQ(file.find(name)->dtype, "F32");
      EXPECT_TRUE(tensors.at(name).equal(model.store.master(id).to(at::kFloat))) << name;
    }
    ASSERT_TRUE(tensors.count(kFactor));
    EXPECT_TRUE(file.find(kFactor)->shape.empty());
    EXPECT_EQ(tensors.at(kFactor).item<float>(), 0.25F);
  }
}

TEST(ExportWeights, IsByteIdenticalAndRoundTrips) {
  const TemporaryFolder folder;
  for (const Precision precision : {Precision::kFp32, Precision::kBf16}) {
    Model model(small_config(), precision);
    export_weights(folder / "a", small_config(), model.store);
    export_weights(folder / "b", small_config(), model.store);
    EXPECT_EQ(read_file(folder / "a"), read_file(folder / "b"));
    Model other(small_config(), precision);
    other.store.initialize(9);
    load_weights(folder / "a", small_config(), other.store);
    for (ParamId id = 0; id < model.store.size(); ++id) {
      EXPECT_TRUE(other.store.master(id).equal(model.store.master(id)));
      EXPECT_TRUE(other.store.weight(id).equal(model.store.weight(id))) << "working weights were not refreshed";
    }
    export_weights(folder / "c", small_config(), other.store);
    EXPECT_EQ(read_file(folder / "a"), read_file(folder / "c"));
  }
}

TEST(ExportWeights, RefusesPartsOfTensors) {
  const TemporaryFolder folder;
  ParameterStore store;
  store.add({.name = "x", .global_shape = {4, 2}, .slice_begin = 0, .slice_end = 2});
  store.allocate(Precision::kFp32, at::kCPU);
  expect_error(ExitCode::kOther, {"x", "[2,2]", "[4,2]"}, [&] { export_weights(folder / "a", small_config(), store); });
}

TEST(LoadWeights, TheGoldenWeightsGiveTheGoldenLogits) {
  const TemporaryFolder folder;
  const Golden golden("two_layers");
  Tensors tensors;
  for (const auto& [name, tensor] : golden.tensors) {
    if (name.rfind("weight.", 0) == 0) tensors[name.substr(7)] = tensor;
  }
  write_tensors(folder / "x", tensors);
  Model model(golden.config, Precision::kFp64);
  load_weights(folder / "x", golden.config, model.store);
  EXPECT_LE(test::relative_error(model.logits(golden.at("ids"), golden.at("positions")), golden.at("logits")), 1e-12);
}

TEST(LoadWeights, ConvertsEveryFloatFormat) {
  const TemporaryFolder folder;
  for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16}) {
    const Tensors tensors = model_tensors(type);
    write_tensors(folder / "x", tensors);
    for (const Precision precision : {Precision::kFp64, Precision::kFp32, Precision::kBf16}) {
      Model model(small_config(), precision);
      load_weights(folder / "x", small_config(), model.store);
      for (ParamId id = 0; id < model.store.size(); ++id) {
        EXPECT_TRUE(model.store.master(id).equal(tensors.at(model.store.spec(id).name).to(master_type(precision))));
      }
    }
  }
}

TEST(LoadWeights, EitherNameOfTheTiedTensorWillDo) {
  const TemporaryFolder folder;
  Tensors tensors = model_tensors();
  const at::Tensor embedding = tensors[kEmbedding];
  tensors["decoder.weight"] = embedding.clone();
  write_tensors(folder / "both", tensors);
  tensors.erase(kEmbedding);
  write_tensors(folder / "decoder", tensors);
  for (const char* name : {"both", "decoder"}) {
    Model model(small_config(), Precision::kFp32);
    load_weights(folder / name, small_config(), model.store);
    EXPECT_TRUE(model.store.master(model.store.find(kEmbedding)).equal(embedding)) << name;
  }
  // One bit apart: not tied.
  tensors[kEmbedding] = embedding.clone();
  tensors["decoder.weight"] = embedding.clone();
  tensors["decoder.weight"][36][31].mul_(1 + 0x1p-23);
  write_tensors(folder / "apart", tensors);
  Model model(small_config(), Precision::kFp32);
  expect_error(ExitCode::kUsage, {"decoder.weight", kEmbedding, "differ"},
               [&] { load_weights(folder / "apart", small_config(), model.store); });
  tensors["decoder.weight"] = embedding.to(at::kDouble);
  write_tensors(folder / "types", tensors);
  expect_error(ExitCode::kUsage, {"decoder.weight", "differ"},
               [&] { load_weights(folder / "types", small_config(), model.store); });
}

TEST(LoadWeights, WrongFilesAreRefusedAndChangeNothing) {
  struct Case {
    const char* what;
    std::vector<std::string> words;
    std::function<void(Tensors&)> change;
  };
  const std::string norm = "encoder.final_norm.bias", dense = "encoder.layers.1.attn.dense.weight";
  const Case cases[] = {
      {"missing", {norm, "lacks", "[32]"}, [&](Tensors& t) { t.erase(norm); }},
      {"both tied names missing", {kEmbedding, "lacks"}, [&](Tensors& t) { t.erase(kEmbedding); }},
      {"misshaped", {norm, "[33]", "[32]"}, [&](Tensors& t) { t[norm] = at::zeros({33}); }},
      {"transposed",
       {"[48,32]", "[32,48]", "dense_in"},
       [&](Tensors& t) {
         t["encoder.layers.0.ffn.dense_in.weight"] = at::zeros({32, 48});
       }},
      {"flat", {dense, "[1024]"}, [&](Tensors& t) { t[dense] = t[dense].reshape({-1}); }},
      {"integers",
       {dense, "I64"},
       [&](Tensors& t) {
         t[dense] = at::zeros({32, 32}, at::kLong);
       }},
      {"extra", {"encoder.extra", "[2]"}, [&](Tensors& t) { t["encoder.extra"] = at::zeros({2}); }},
      {"one layer more",
       {"encoder.layers.2", "model.layers=2"},
       [&](Tensors& t) { t["encoder.layers.2.norm1.weight"] = at::ones({32}); }},
      {"decoder bias", {"decoder.bias"}, [&](Tensors& t) { t["decoder.bias"] = at::zeros({37}); }},
      {"factor of a layer that is not there",
       {"encoder.layers.7"},
       [&](Tensors& t) {
         t["encoder.layers.7.attn.self_attention.norm_factor"] = at::scalar_tensor(0.25, at::kFloat);
       }},
      {"factor without a layer",
       {".self_attention.norm_factor"},
       [&](Tensors& t) { t[".self_attention.norm_factor"] = at::scalar_tensor(0.25, at::kFloat); }},
      {"wrong factor",
       {kFactor, "0.25001", "1/sqrt(16)", "model.heads"},
       [&](Tensors& t) { t[kFactor] = at::scalar_tensor(0.25001, at::kFloat); }},
      {"factor that is not a number", {kFactor}, [&](Tensors& t) { t[kFactor] = at::scalar_tensor(NAN, at::kFloat); }},
      {"factor with a shape", {kFactor, "[2]"}, [&](Tensors& t) { t[kFactor] = at::full({2}, 0.25F); }},
  };
  const TemporaryFolder folder;
  for (const Case& c : cases) {
    Tensors tensors = model_tensors();
    c.change(tensors);
    write_tensors(folder / "x", tensors);
    Model model(small_config(), Precision::kFp32), untouched(small_config(), Precision::kFp32);
    expect_error(
        ExitCode::kUsage, {folder / "x"},
        [&] {
          try {
            load_weights(folder / "x", small_config(), model.store);
          } catch (const Error& error) {
            for (const std::string& word : c.words) {
              EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << word << ": " << error.what();
            }
            throw;
          }
        },
        c.what);
    for (ParamId id = 0; id < model.store.size(); ++id) {
      EXPECT_TRUE(model.store.master(id).equal(untouched.store.master(id))) << c.what << ": half loaded";
    }
  }
  Model model(small_config(), Precision::kFp32);
  expect_error(ExitCode::kUsage, {"missing"}, [&] { load_weights(folder / "missing", small_config(), model.store); });
}

TEST(LoadWeights, AcceptsTheFactorsOfEveryFloatFormat) {
  const TemporaryFolder folder;
  ModelConfig config = small_config();
  config.heads = 4;  // 1/sqrt(8) is not exact in any format
  for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16}) {
    Tensors tensors = model_tensors(type);
    tensors[kFactor] = at::scalar_tensor(1 / std::sqrt(8.0), at::kDouble).to(type);
    write_tensors(folder / "x", tensors);
    Model model(config, Precision::kFp32);
    EXPECT_NO_THROW(load_weights(folder / "x", config, model.store)) << type;
  }
}

TEST(ModelConfigOf, ReadsTheShapeOfAnExport) {
  const TemporaryFolder folder;
  for (const std::int64_t heads : {1, 2, 4, 16}) {
    ModelConfig config = small_config();
    config.heads = heads;
    Model model(config, Precision::kFp32);
    export_weights(folder / "x", config, model.store);
    const ModelConfig found = model_config_of(folder / "x");
    EXPECT_EQ(found.layers, config.layers);
    EXPECT_EQ(found.hidden, config.hidden);
    EXPECT_EQ(found.heads, heads);
    EXPECT_EQ(found.ffn, config.ffn);
    EXPECT_EQ(found.vocab_size, config.vocab_size);
    EXPECT_EQ(found.seq_length, config.seq_length);
    Model other(found, Precision::kFp32);
    EXPECT_NO_THROW(load_weights(folder / "x", found, other.store));
  }
}

TEST(ModelConfigOf, PublicFilesHaveTheRecipesRowLengthAndEitherTiedName) {
  const TemporaryFolder folder;
  Tensors tensors = model_tensors();
  tensors["encoder.layers.0.attn.self_attention.norm_factor"] = at::scalar_tensor(0.25, at::kFloat);
  tensors["decoder.weight"] = tensors[kEmbedding];
  tensors.erase(kEmbedding);
  write_tensors(folder / "x", tensors);
  const ModelConfig found = model_config_of(folder / "x");
  EXPECT_EQ(found.seq_length, 128);
  EXPECT_EQ(found.vocab_size, 37);
  EXPECT_EQ(found.heads, 2);
}

TEST(ModelConfigOf, RefusesWhatTellsNoShape) {
  const std::string factor = "encoder.layers.0.attn.self_attention.norm_factor";
  struct Case {
    std::string word;
    std::function<void(Tensors&)> change;
  };
  const auto factor_of = [&](double value) {
    return [&factor, value](Tensors& t) { t[factor] = at::scalar_tensor(value, at::kFloat); };
  };
  const Case cases[] = {
      {kEmbedding, [](Tensors& t) { t[kEmbedding] = at::zeros({37 * 32}); }},
      {"decoder.weight", [](Tensors& t) { t.erase(kEmbedding); }},
      {"dense_in", [](Tensors& t) { t.erase("encoder.layers.0.ffn.dense_in.weight"); }},
      {"norm_factor", [&](Tensors& t) { t.erase(factor); }},
      {"norm_factor", [&](Tensors& t) { t[factor] = at::full({1}, 0.25F); }},
      {"norm_factor", factor_of(0)},
      {"norm_factor", factor_of(NAN)},
      {"norm_factor", factor_of(INFINITY)},
      {"norm_factor", factor_of(1e-30)},
      {"norm_factor", factor_of(0.3)},
      {"model.vocab_size",
       [](Tensors& t) {
         t[kEmbedding] = at::zeros({3, 32});
       }},
      {"model.hidden",
       [](Tensors& t) {
         t[kEmbedding] = at::zeros({37, 0});
       }},
  };
  const TemporaryFolder folder;
  for (const Case& c : cases) {
    Tensors tensors = model_tensors();
    tensors[factor] = at::scalar_tensor(0.25, at::kFloat);
    c.change(tensors);
    write_tensors(folder / "x", tensors);
    expect_error(
        ExitCode::kUsage, {c.word}, [&] { (void)model_config_of(folder / "x"); }, c.word);
  }
}

TEST(LoadWeights, TakesTheSliceOfThisRank) {
  const TemporaryFolder folder;
  const at::Tensor full = at::arange(24, at::kDouble).view({4, 6});
  write_tensors(folder / "x", {{"x", full}});
  for (std::int64_t dim = 0; dim < 2; ++dim) {
    ParameterStore store;
    store.add({.name = "x", .global_shape = {4, 6}, .slice_dim = dim, .slice_begin = 1, .slice_end = 3});
    store.allocate(Precision::kFp32, at::kCPU);
    load_weights(folder / "x", small_config(), store);
    EXPECT_TRUE(store.master(0).equal(full.slice(dim, 1, 3).to(at::kFloat)));
  }
}

}  // namespace
}  // namespace cram
