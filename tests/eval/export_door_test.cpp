// A new export format is one row: a list of tensors, made here and written from a checkpoint. What a format cannot hold
// is refused before anything is written.
#include "eval/export.h"

#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <filesystem>

#include "base/file_io.h"
#include "base/log.h"
#include "support/expect_error.h"
#include "support/golden.h"
#include "support/temporary_folder.h"
#include "train/train_config.h"

namespace cram::test {
namespace {

namespace fs = std::filesystem;

// "NAME rows sum" of every parameter.
void write_list(LoadedModel& model, const std::string& output) {
  std::string text;
  for (ParamId id = 0; id < model.store->size(); ++id) {
    const ParamSpec& spec = model.store->spec(id);
    text += concat(spec.name, " ", spec.global_shape[0], " ", model.store->master(id).sum().item<double>(), "\n");
  }
  write_file_atomically(output + "/list.txt", text);
}

void check_list(const LoadedModel& model) {
  CRAM_CHECK(model.config.layers <= 2, ExitCode::kUsage, "--format list holds 2 layers at most, this model has ",
             model.config.layers);
}

class NoPositions final : public PositionForm {
 public:
  at::Tensor added(std::int64_t /*batch*/, std::int64_t /*seq*/) override { return {}; }
  void added_backward(const at::Tensor& /*d_sum*/, std::int64_t /*batch*/, std::int64_t /*seq*/) override {}
};

class ExportDoor : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    configure_log({.terminal_level = LogLevel::kError});
    expect_error(ExitCode::kUsage, {"--format list is unknown, expected one of cramming", "did you mean cramming?"},
                 [] { export_model({.checkpoint = "nowhere", .output = "nowhere", .format = "list"}); });
    export_formats().add({"list", "names, rows and sums as text", write_list, check_list});
    position_forms().add({"none", [](const ModelConfig&, ParameterStore&, const TensorRegion&) {
                            return std::unique_ptr<PositionForm>(new NoPositions);
                          }});
    // Masked tokens with a parameter of its own.
    objectives().add({"mlm-and-more", [](const ObjectiveContext& context) {
                        context.store.add({.name = "head.extra", .global_shape = {3}});
                        return objectives().at("mlm").make(context);
                      }});
  }

  // A step folder of a model with these options.
  [[nodiscard]] std::string checkpoint(const std::vector<std::string>& options) const {
    OptionTable table;
    Config config;
    add_train_options(table, config);
    for (const char* option : {"model.layers=2", "model.hidden=16", "model.heads=2", "model.ffn=24",
                               "model.vocab_size=37", "model.seq_length=8"}) {
      table.apply_override(option);
    }
    for (const std::string& option : options) table.apply_override(option);
    ParameterStore store;
    const cram::Model model(config.model, store, config.train.objective);
    store.allocate(Precision::kFp32, at::kCPU, adam_states());
    store.initialize(4);
    CheckpointInfo info;
    info.progress.step = 1;
    info.settings = table.values();
    info.settings.erase("data.shards");
    (void)CheckpointFolder(root_ / "checkpoints").save(store, info, 1);
    return root_ / "checkpoints/step-000000001";
  }

  at::NoGradGuard no_grad_;
  TemporaryFolder root_;
};

TEST_F(ExportDoor, ARowOfTheTableIsExported) {
  export_model({.checkpoint = checkpoint({}), .output = root_ / "out", .format = "list"});
  const std::string text = read_file(root_ / "out/list.txt");
  LoadedModel model = load_model(root_ / "checkpoints/step-000000001", Precision::kFp32, at::kCPU);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), static_cast<std::ptrdiff_t>(model.store->size()));
  EXPECT_NE(text.find("encoder.embedding.word_embedding.weight 37 "), std::string::npos) << text;
  EXPECT_NE(text.find("encoder.layers.1.norm2.weight 16 16\n"), std::string::npos) << text;
  EXPECT_FALSE(fs::exists(root_ / "out/model.safetensors"));
}

TEST_F(ExportDoor, TheFirstRowWritesWhatCanBeLoadedAgain) {
  export_model({.checkpoint = checkpoint({}), .output = root_ / "out"});
  LoadedModel found = load_model(root_ / "out", Precision::kFp32, at::kCPU);
  LoadedModel expected = load_model(root_ / "checkpoints/step-000000001", Precision::kFp32, at::kCPU);
  ASSERT_EQ(found.store->size(), expected.store->size());
  for (ParamId id = 0; id < found.store->size(); ++id) {
    EXPECT_TRUE(at::equal(found.store->master(id), expected.store->master(id))) << found.store->spec(id).name;
  }
}

TEST_F(ExportDoor, WhatAFormatCannotHoldIsRefusedBeforeAnythingIsWritten) {
  const auto refused = [&](const std::vector<std::string>& options, const std::string& format,
                           std::optional<std::int64_t> rows, std::initializer_list<std::string> words) {
    remove_tree(root_ / "checkpoints");
    const std::string path = checkpoint(options);
    // A sample of an earlier export stays where it is as well.
    fs::create_directories(root_ / "old");
    write_file_atomically(root_ / "old/sample.safetensors", "kept");
    for (const char* output : {"new", "old"}) {
      expect_error(ExitCode::kUsage, words, [&] {
        export_model({.checkpoint = path, .output = root_ / output, .format = format, .sample_rows = rows});
      });
    }
    EXPECT_FALSE(fs::exists(root_ / "new"));
    EXPECT_EQ(read_file(root_ / "old/sample.safetensors"), "kept");
    EXPECT_EQ(std::distance(fs::directory_iterator(root_ / "old"), fs::directory_iterator()), 1);
  };
  refused({"model.layers=3"}, "list", {}, {"--format list holds 2 layers at most", "has 3"});
  refused({"model.positions=none"}, "cramming", {}, {"model.positions=sinusoidal only", "model.positions=none"});
  refused({"train.objective=mlm-and-more"}, "cramming", {}, {"no name for head.extra"});
  refused({}, "lits", {}, {"--format lits is unknown, expected one of cramming, list", "did you mean list?"});
  refused({}, "list", 4, {"--sample needs --shards"});
  // What one format has no name for another may hold.
  for (const char* option : {"model.positions=none", "train.objective=mlm-and-more"}) {
    remove_tree(root_ / "checkpoints");
    export_model({.checkpoint = checkpoint({option}), .output = root_ / "out", .format = "list"});
    EXPECT_TRUE(fs::exists(root_ / "out/list.txt"));
  }
}

}  // namespace
}  // namespace cram::test
