// Checkpoints that older programs wrote: format version 2, as 4 ranks (tp2, dp2, ZeRO-1) wrote it after 3 steps.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/hdf5_file.h"
#include "parallel/training_support.h"
#include "run/checkpoint.h"
#include "support/expect_error.h"
#include "support/temporary_folder.h"

namespace cram::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

const std::string kOlder = std::string(CRAM_SOURCE_DIR) + "/tests/run/checkpoint_v2/step-000000003";

TrainingSetup setup_of(const Layout& layout, bool zero, const std::string& checkpoint) {
  TrainingSetup setup;
  setup.device = at::kCPU;
  setup.model = model_of(1, 16, 2, 32, 300, 16);
  setup.layout = layout;
  setup.zero = zero;
  setup.steps = 3;
  setup.precision = Precision::kFp32;
  setup.checkpoint = checkpoint;
  return setup;
}

// The whole tensors of one kind, put together here from the files of the fixture, whose slices are all of rows, of
// halves of rows or of columns.
std::map<std::string, at::Tensor> whole_tensors(const std::string& kind) {
  const json manifest = json::parse(std::ifstream(kOlder + "/manifest.json"));
  EXPECT_EQ(manifest.at("version"), 2);
  std::map<std::string, at::Tensor> slices, result;  // by name and slice
  std::map<std::string, json> entries;
  for (const json& file : manifest.at("files")) {
    const ArrayFileReader reader(kOlder + "/" + file.at("name").get<std::string>(), ExitCode::kOther);
    for (const json& entry : file.at("tensors")) {
      const auto name = entry.at("name").get<std::string>();
      const std::string key = name + entry.at("slice").dump();
      ParamSpec spec{.name = name, .global_shape = entry.at("shape").get<std::vector<std::int64_t>>()};
      std::vector<std::int64_t> shape = spec.global_shape;
      const auto slice = entry.at("slice").get<std::vector<std::int64_t>>();
      shape[static_cast<std::size_t>(slice[0])] = slice[3] * (slice[2] - slice[1]);
      at::Tensor& values = slices[key];
      if (!values.defined()) values = at::zeros({element_count(shape)}, at::kFloat);
      const std::int64_t begin = entry.contains("flat") ? entry.at("flat")[0].get<std::int64_t>() : 0;
      const std::string path = "/" + kind + "/" + name + (begin > 0 ? "@" + std::to_string(begin) : "");
      reader.read(path, reader.info(path), values.data_ptr<float>() + begin);
      entries[key] = entry;
    }
  }
  for (const auto& [key, entry] : entries) {
    const auto slice = entry.at("slice").get<std::vector<std::int64_t>>();
    ParamSpec spec{.name = entry.at("name").get<std::string>(),
                   .global_shape = entry.at("shape").get<std::vector<std::int64_t>>(),
                   .slice_dim = slice[0],
                   .slice_begin = slice[1],
                   .slice_end = slice[2],
                   .slice_groups = slice[3]};
    at::Tensor& whole = result[spec.name];
    if (!whole.defined()) whole = at::zeros(spec.global_shape, at::kFloat);
    std::vector<std::int64_t> shape = spec.global_shape;
    shape[static_cast<std::size_t>(slice[0])] = slice[3] * (slice[2] - slice[1]);
    put_slice(whole, spec, slices.at(key).view(shape));
  }
  return result;
}

const Layout kWriter{.tensor = 2, .pipeline = 1, .data = 2};

TEST(OlderCheckpoint, EveryLayoutLoadsEveryNumberAsItLies) {
  EXPECT_EQ(verify_checkpoint(kOlder).progress.step, 3);
  std::map<std::string, std::map<std::string, at::Tensor>> expected;
  for (const char* kind : {"master", "exp_avg", "exp_avg_sq"}) expected[kind] = whole_tensors(kind);
  ASSERT_GT(expected["master"].size(), 8U);
  for (const auto& [layout, zero] : std::vector<std::pair<Layout, bool>>{
           {{}, false}, {kWriter, true}, {{.data = 3}, true}, {{.data = 2}, false}, {{.tensor = 2}, false}}) {
    std::size_t compared = 0;
    std::mutex mutex;
    const auto messages = run_ranks(layout.world_size(), [&](Communicator& world) {
      const TrainingSetup setup = setup_of(layout, zero, kOlder);
      const Config config = resolve_train_config(training_config(setup), layout);
      const Mesh mesh(world, layout);
      ParameterStore store;
      const cram::Model model(config.model, store, make_placement(config, mesh), config.train.objective);
      store.allocate(Precision::kFp32, at::kCPU, state_layout("adamw"), partition_of(setup, mesh));
      load_checkpoint(kOlder, store, mesh);
      const std::lock_guard lock(mutex);
      for (ParamId id = 0; id < store.size(); ++id) {
        const ParamSpec& spec = store.spec(id);
        for (const ParameterStore::OwnedRange& range : store.owned(id)) {
          for (const NamedTensor& stored : range.stored()) {
            const at::Tensor local = take_slice(expected.at(stored.name).at(spec.name), spec).reshape({-1});
            EXPECT_TRUE(stored.tensor.equal(local.slice(0, range.begin, range.end))) << stored.name << spec.name;
            ++compared;
          }
        }
        EXPECT_TRUE(store.weight(id).equal(take_slice(expected.at("master").at(spec.name), spec))) << spec.name;
      }
    });
    for (const std::string& message : messages) EXPECT_EQ(message, "") << layout.text();
    EXPECT_GE(compared, 3 * expected["master"].size());
  }
}

// Going on from the old format, and from the same state saved in the new one, gives the same bits.
TEST(OlderCheckpoint, ResumesBitEqual) {
  const TemporaryFolder root;
  const std::string renewed = root / "checkpoints";
  const auto messages = run_ranks(kWriter.world_size(), [&](Communicator& world) {
    const TrainingSetup setup = setup_of(kWriter, true, kOlder);
    const Config config = resolve_train_config(training_config(setup), kWriter);
    const Mesh mesh(world, kWriter);
    ParameterStore store;
    const cram::Model model(config.model, store, make_placement(config, mesh), config.train.objective);
    store.allocate(Precision::kFp32, at::kCPU, state_layout("adamw"), partition_of(setup, mesh));
    load_checkpoint(kOlder, store, mesh);
    CheckpointInfo info;
    info.progress.step = 3;
    CheckpointFolder(renewed).save(store, info, 1, world, /*writes=*/true);
  });
  for (const std::string& message : messages) ASSERT_EQ(message, "");
  const TrainingResult before = train(setup_of(kWriter, true, kOlder));
  const TrainingResult after = train(setup_of(kWriter, true, renewed + "/step-000000003"));
  const TrainingResult fresh = train(setup_of(kWriter, true, ""));
  ASSERT_TRUE(before.fine()) << before.messages[0];
  ASSERT_TRUE(after.fine()) << after.messages[0];
  EXPECT_EQ(before.losses, after.losses);
  EXPECT_EQ(before.norms, after.norms);
  EXPECT_NE(before.losses, fresh.losses);
  for (const auto& [name, tensor] : before.final) EXPECT_TRUE(tensor.equal(after.final.at(name))) << name;
  for (const auto& [name, tensor] : before.states.at("exp_avg_sq")) {
    EXPECT_TRUE(tensor.equal(after.states.at("exp_avg_sq").at(name))) << name;
  }
}

TEST(OlderCheckpoint, DamageIsFoundBeforeUse) {
  const TemporaryFolder root;
  const std::string copy = root / "step-000000003";
  fs::copy(kOlder, copy);
  std::string content = read_file(copy + "/rank-00002.h5");
  content[content.size() - 9] ^= 8;
  write_file_atomically(copy + "/rank-00002.h5", content);
  expect_error(ExitCode::kNoCheckpoint, {"rank-00002.h5", "digest"}, [&] { (void)verify_checkpoint(copy); });
  const TrainingResult result = train(setup_of(kWriter, true, copy));
  for (const std::string& message : result.messages) EXPECT_NE(message.find("rank-00002.h5"), std::string::npos);
}

}  // namespace
}  // namespace cram::test
