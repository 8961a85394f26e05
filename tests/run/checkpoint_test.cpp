// Checkpoints: bit-equal, committed whole or not at all, never trusted without their digests.
#include "run/checkpoint.h"

#include <gtest/gtest.h>
#include <torch/types.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/digest.h"
#include "base/file_io.h"
#include "base/log.h"
#include "base/rng.h"
#include "support/expect_error.h"
#include "support/file_size_limit.h"
#include "support/golden.h"
#include "support/temporary_folder.h"

namespace cram {
namespace {

namespace fs = std::filesystem;
using test::expect_error;
using test::Model;
using test::TemporaryFolder;

ModelConfig tiny_config() { return test::model_of(1, 16, 2, 24, 21, 8); }

void randomize(ParameterStore& store, std::uint64_t seed) {
  store.initialize(seed);
  for (ParamId id = 0; id < store.size(); ++id) {
    std::vector<double> values(static_cast<std::size_t>(store.local_numel(id)));
    for (const at::Tensor& t : {store.master(id), store.state(id, "exp_avg"), store.state(id, "exp_avg_sq")}) {
      fill_normal(++seed * 1000 + id, 0, 0, 1, values.data(), values.size());
      t.copy_(at::tensor(values, at::kDouble).view(store.local_shape(id)));
    }
  }
  store.refresh_working();
}

bool bit_equal(const ParameterStore& a, const ParameterStore& b) {
  bool equal = a.size() == b.size();
  for (ParamId id = 0; equal && id < a.size(); ++id) {
    equal = a.master(id).equal(b.master(id)) && a.weight(id).equal(b.weight(id)) &&
            a.state(id, "exp_avg").equal(b.state(id, "exp_avg")) &&
            a.state(id, "exp_avg_sq").equal(b.state(id, "exp_avg_sq"));
  }
  return equal;
}

CheckpointInfo info_at(std::int64_t step) {
  CheckpointInfo info;
  info.progress = {.step = step,
                   .consumed_samples = 8192 * step,
                   .tokens = 1'048'576 * step,
                   .elapsed_s = 0.1 + 0.2 + static_cast<double>(step) / 3,
                   .skipped = 3,
                   .skipped_in_a_row = 1,
                   .attempt = 2,
                   .excluded_s = 1e-300};
  info.settings = {{"train.lr", "0.001"}, {"run.output", "runs/\"quoted\" \xc3\xa9"}};
  info.identity = {{"tokenizer", "99aa06d3014798d86001c324468d497f"}};
  info.environment = {{"threads", "2"}};
  return info;
}

// A checkpoints folder with saves at some steps; the state of step s comes from seed s.
struct Saved {
  TemporaryFolder root;
  Model model{tiny_config(), Precision::kBf16};
  CheckpointFolder folder{root / "checkpoints"};

  explicit Saved(std::initializer_list<std::int64_t> steps, std::int64_t keep = 100) {
    configure_log({.terminal_level = LogLevel::kError});
    for (const std::int64_t step : steps) save(step, keep);
  }
  std::uintmax_t save(std::int64_t step, std::int64_t keep = 100) {
    randomize(model.store, static_cast<std::uint64_t>(step));
    return folder.save(model.store, info_at(step), keep);
  }
  std::optional<CheckpointFolder::Found> load_newest() { return folder.load_newest(model.store); }
  [[nodiscard]] std::string path(std::int64_t step) const {
    const std::string digits = std::to_string(step);
    return root / ("checkpoints/step-" + std::string(9 - digits.size(), '0') + digits);
  }
  [[nodiscard]] std::vector<std::string> names() const {
    std::vector<std::string> found;
    for (const auto& entry : fs::directory_iterator(root / "checkpoints"))
      found.push_back(entry.path().filename().string());
    std::sort(found.begin(), found.end());
    return found;
  }
};

void write_bytes(const std::string& path, const std::string& bytes) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

void flip_bit(const std::string& path, std::size_t bit) {
  std::string bytes = read_file(path);
  bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << (bit % 8)));
  write_bytes(path, bytes);
}

class EveryPrecision : public testing::TestWithParam<Precision> {};
INSTANTIATE_TEST_SUITE_P(All, EveryPrecision, testing::Values(Precision::kBf16, Precision::kFp32, Precision::kFp64),
                         [](const auto& given) { return std::string(precision_name(given.param)); });

TEST_P(EveryPrecision, LoadsBackBitEqual) {
  const TemporaryFolder root;
  Model model(tiny_config(), GetParam()), other(tiny_config(), GetParam());
  randomize(model.store, 5);
  // Values that text or arithmetic would lose.
  at::Tensor flat = model.store.master(0).view({-1});
  flat[0].fill_(-0.0);
  flat[1].fill_(INFINITY);
  flat[2].fill_(1e-41);
  model.store.refresh_working();
  ASSERT_FALSE(bit_equal(model.store, other.store));
  CheckpointFolder folder(root / "checkpoints");
  const std::uintmax_t bytes = folder.save(model.store, info_at(50), 2);
  const std::string path = root / "checkpoints/step-000000050";
  EXPECT_EQ(bytes, fs::file_size(path + "/rank-00000.h5") + fs::file_size(path + "/rank-00000.json"));
  EXPECT_GE(bytes, checkpoint_bytes(model.store));
  EXPECT_LT(bytes, checkpoint_bytes(model.store) + 70'000);
  load_checkpoint(path, other.store);
  EXPECT_TRUE(bit_equal(model.store, other.store));
  EXPECT_TRUE(std::signbit(other.store.master(0).view({-1})[0].item<double>()));

  // Saved again it is the same tensor for tensor, and the same file.
  CheckpointFolder second(root / "second");
  second.save(other.store, info_at(50), 2);
  EXPECT_EQ(read_file(path + "/rank-00000.h5"), read_file(root / "second/step-000000050/rank-00000.h5"));
}

TEST(Checkpoint, ProgressAndSettingsComeBackBitEqual) {
  Saved saved({7});
  const std::optional<CheckpointFolder::Found> found = saved.load_newest();
  ASSERT_TRUE(found);
  EXPECT_EQ(found->path, saved.path(7));
  const CheckpointInfo expected = info_at(7);
  EXPECT_EQ(found->info.progress.step, 7);
  EXPECT_EQ(found->info.progress.consumed_samples, expected.progress.consumed_samples);
  EXPECT_EQ(found->info.progress.tokens, expected.progress.tokens);
  EXPECT_EQ(found->info.progress.elapsed_s, expected.progress.elapsed_s);
  EXPECT_EQ(found->info.progress.excluded_s, 1e-300);
  EXPECT_EQ(found->info.progress.skipped, 3);
  EXPECT_EQ(found->info.progress.skipped_in_a_row, 1);
  EXPECT_EQ(found->info.progress.attempt, 2);
  EXPECT_EQ(found->info.settings, expected.settings);
  EXPECT_EQ(found->info.identity, expected.identity);
  EXPECT_EQ(found->info.environment, expected.environment);
}

TEST(Checkpoint, KeepsTheNewest) {
  Saved saved({10, 20, 30, 40}, 2);
  EXPECT_EQ(saved.names(), (std::vector<std::string>{"step-000000030", "step-000000040"}));
  saved.save(50, 1);
  EXPECT_EQ(saved.names(), std::vector<std::string>{"step-000000050"});
  saved.save(60, 2);
  EXPECT_EQ(saved.folder.committed(), (std::vector<std::string>{saved.path(50), saved.path(60)}));
}

TEST(Checkpoint, SavingAStepAgainKeepsTheFirst) {
  Saved saved({10});
  const std::string before = read_file(saved.path(10) + "/manifest.json");
  saved.save(10, 2);
  EXPECT_EQ(read_file(saved.path(10) + "/manifest.json"), before);
  EXPECT_EQ(saved.names(), std::vector<std::string>{"step-000000010"});
}

TEST(Checkpoint, NothingThereIsNoCheckpoint) {
  const TemporaryFolder root;
  EXPECT_FALSE(CheckpointFolder(root / "missing").newest());
  EXPECT_TRUE(CheckpointFolder(root / "missing").committed().empty());
  make_folders(root / "empty");
  EXPECT_FALSE(CheckpointFolder(root / "empty").newest());
  make_folders(root / "foreign/step-000000010.tmp-1-2-3");
  make_folders(root / "foreign/step-x");
  make_folders(root / "foreign/step-");
  make_folders(root / "foreign/epoch-1");
  write_file_atomically(root / "foreign/notes.txt", "notes");
  EXPECT_FALSE(CheckpointFolder(root / "foreign").newest());
  expect_error(ExitCode::kNoCheckpoint, {"notes.txt"},
               [&] { (void)CheckpointFolder(root / "foreign/notes.txt").newest(); });
}

TEST(Checkpoint, ForeignNamesStayAndLeftoversGoWithTheNextSave) {
  Saved saved({10});
  make_folders(saved.root / "checkpoints/step-000000020.tmp-99-1-0");
  write_file_atomically(saved.root / "checkpoints/notes.txt", "notes");
  make_folders(saved.root / "checkpoints/mine");
  EXPECT_EQ(saved.load_newest()->path, saved.path(10));
  saved.save(30, 1);
  EXPECT_EQ(saved.names(), (std::vector<std::string>{"mine", "notes.txt", "step-000000030"}));
}

TEST(Checkpoint, OrderIsByNumber) {
  Saved saved({});
  saved.save(1'000'000'000);  // one digit wider than the names
  saved.save(999'999'999);
  ASSERT_EQ(saved.folder.committed().size(), 2U);
  EXPECT_EQ(saved.load_newest()->info.progress.step, 1'000'000'000);
}

TEST(Checkpoint, ADamagedOneIsSetAsideAndTheOneBeforeTaken) {
  for (const char* file : {"rank-00000.h5", "rank-00000.json", "manifest.json"}) {
    for (const int how : {0, 1, 2, 3}) {
      Saved saved({10, 20, 30});
      for (const std::int64_t step : {20, 30}) {
        const std::string path = saved.path(step) + "/" + file;
        const std::string bytes = read_file(path);
        if (how == 0) flip_bit(path, bytes.size() * 4);
        if (how == 1) write_bytes(path, bytes.substr(0, bytes.size() - 1));
        if (how == 2) write_bytes(path, "");
        if (how == 3) remove_tree(path);
      }
      const std::optional<CheckpointFolder::Found> found = saved.load_newest();
      ASSERT_TRUE(found);
      EXPECT_EQ(found->path, saved.path(10)) << file << how;
      EXPECT_EQ(saved.names(),
                (std::vector<std::string>{"step-000000010", "step-000000020.damaged", "step-000000030.damaged"}));
      Model expected(tiny_config(), Precision::kBf16);
      randomize(expected.store, 10);
      EXPECT_TRUE(bit_equal(saved.model.store, expected.store));
    }
  }
}

TEST(Checkpoint, AStepCanBeDamagedTwice) {
  Saved saved({10, 20});
  for (int round = 0; round < 3; ++round) {
    saved.save(20);
    flip_bit(saved.path(20) + "/rank-00000.h5", 12345);
    const std::optional<CheckpointFolder::Found> found = saved.load_newest();
    ASSERT_TRUE(found);
    EXPECT_EQ(found->path, saved.path(10));
  }
  EXPECT_EQ(saved.names().size(), 4U);
}

TEST(Checkpoint, EveryDamageIsDetected) {
  const Saved saved({10});
  EXPECT_NO_THROW((void)verify_checkpoint(saved.path(10)));
  RandomStream random(4);
  for (const char* file : {"rank-00000.h5", "rank-00000.json", "manifest.json"}) {
    const std::string path = saved.path(10) + "/" + file;
    const std::string whole = read_file(path);
    const auto detected = [&](const std::string& what) {
      expect_error(
          ExitCode::kNoCheckpoint, {file}, [&] { (void)verify_checkpoint(saved.path(10)); }, concat(file, ": ", what));
    };
    for (std::size_t i = 0; i < 20; ++i) {
      const std::size_t length = i == 19 ? whole.size() - 2 : whole.size() * i / 20;
      write_bytes(path, whole.substr(0, length));
      detected(concat("cut to ", length));
    }
    write_bytes(path, whole + "x");
    detected("one byte more");
    for (int i = 0; i < 200; ++i) {
      write_bytes(path, whole);
      const auto bit = static_cast<std::size_t>(random.below(8 * whole.size()));
      flip_bit(path, bit);
      detected(concat("bit ", bit));
    }
    remove_tree(path);
    detected("missing");
    write_bytes(path, whole);
    EXPECT_NO_THROW((void)verify_checkpoint(saved.path(10))) << "the tests above left something behind";
  }
}

TEST(Checkpoint, AFileOfAnotherStepIsDetected) {
  Saved saved({10, 20});
  const std::string foreign = read_file(saved.path(20) + "/rank-00000.h5");
  write_bytes(saved.path(10) + "/rank-00000.h5", foreign);
  expect_error(ExitCode::kNoCheckpoint, {"rank-00000.h5", "digest", "expected"},
               [&] { (void)verify_checkpoint(saved.path(10)); });
}

TEST(Checkpoint, OtherProgramsAndVersionsAreNamed) {
  Saved saved({10});
  const std::string path = saved.path(10) + "/manifest.json";
  std::string text = read_file(path);
  const auto replaced = [&](const std::string& from, const std::string& to) {
    std::string changed = text;
    changed.replace(changed.find(from), from.size(), to);
    return changed;
  };
  write_bytes(path, replaced("cram-checkpoint", "some-checkpoint"));
  expect_error(ExitCode::kNoCheckpoint, {"not a cram checkpoint"}, [&] { (void)verify_checkpoint(saved.path(10)); });
  // A newer program's checkpoint is whole: it is refused and stays where it is.
  std::string newer = replaced("\"version\": 3", "\"version\": 4");
  nlohmann::json content = nlohmann::json::parse(newer);
  content.erase("xxh3_128");
  content["xxh3_128"] = digest_text(content.dump());
  write_bytes(path, content.dump(1) + "\n");
  expect_error(ExitCode::kNoCheckpoint, {"format version 4", "reads 2 to 3"},
               [&] { (void)verify_checkpoint(saved.path(10)); });
  expect_error(ExitCode::kNoCheckpoint, {"format version 4"}, [&] { (void)saved.load_newest(); });
  EXPECT_EQ(saved.names(), std::vector<std::string>{"step-000000010"});
  for (const char* bad : {"", "{}", "[]", "null", "{\"magic\":5}", "not JSON", "\xff"}) {
    write_bytes(path, bad);
    expect_error(
        ExitCode::kNoCheckpoint, {"manifest.json"}, [&] { (void)verify_checkpoint(saved.path(10)); }, bad);
  }
}

TEST(Checkpoint, AllDamagedIsAnErrorThatListsThem) {
  Saved saved({10, 20});
  for (const std::int64_t step : {10, 20}) flip_bit(saved.path(step) + "/rank-00000.h5", 9999);
  const std::vector<std::string> before = saved.names();
  expect_error(ExitCode::kNoCheckpoint, {saved.path(10), saved.path(20), "2 committed", "--fresh"},
               [&] { (void)saved.load_newest(); });
  EXPECT_EQ(saved.names(), before) << "nothing may be moved when nothing is valid";
}

TEST(Checkpoint, AFullDiskLeavesTheOldOnesAndNoHalfFolder) {
  Saved saved({10});
  for (const std::uint64_t room : {0U, 1000U, 20'000U}) {
    {
      const test::FileSizeLimit limit(room);
      expect_error(
          ExitCode::kCheckpointStorage, {"step-000000020"}, [&] { saved.save(20, 1); }, concat(room, " bytes"));
    }
    EXPECT_EQ(saved.names(), std::vector<std::string>{"step-000000010"}) << room;
    EXPECT_EQ(saved.load_newest()->path, saved.path(10));
  }
  // Room for the tensors, not for the manifest: it is larger than the limit only when the settings are.
  {
    CheckpointInfo large = info_at(20);
    large.settings["long"] = std::string(200'000, 'x');
    const test::FileSizeLimit limit(150'000);
    expect_error(ExitCode::kCheckpointStorage, {"manifest.json"},
                 [&] { saved.folder.save(saved.model.store, large, 1); });
  }
  EXPECT_EQ(saved.names(), std::vector<std::string>{"step-000000010"});
  saved.save(20, 1);
  EXPECT_EQ(saved.names(), std::vector<std::string>{"step-000000020"});
}

TEST(Checkpoint, AFolderThatCannotBeMadeIsAStorageError) {
  const TemporaryFolder root;
  write_file_atomically(root / "file", "");
  Model model(tiny_config(), Precision::kFp32);
  CheckpointFolder folder(root / "file/checkpoints");
  expect_error(ExitCode::kCheckpointStorage, {"file/checkpoints"}, [&] { folder.save(model.store, info_at(1), 2); });
}

TEST(LoadCheckpoint, OtherModelsAreRefusedByTensor) {
  const Saved saved({10});
  struct Case {
    std::function<void(ModelConfig&)> change;
    std::vector<std::string> words;
  };
  const Case cases[] = {
      {[](ModelConfig& c) { c.layers = 2; }, {"lacks", "encoder.layers.1"}},
      {[](ModelConfig& c) { c.vocab_size = 22; }, {"word_embedding", "[21,16]", "[22,16]"}},
      {[](ModelConfig& c) { c.ffn = 26; }, {"dense_in", "[24,16]", "[26,16]"}},
  };
  for (const Case& c : cases) {
    ModelConfig config = tiny_config();
    c.change(config);
    Model model(config, Precision::kBf16);
    try {
      load_checkpoint(saved.path(10), model.store);
      ADD_FAILURE() << c.words[0];
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kNoCheckpoint);
      for (const std::string& word : c.words)
        EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    }
  }
  ParameterStore one;
  one.add({.name = "encoder.final_norm.bias", .global_shape = {16}});
  one.allocate(Precision::kFp32, at::kCPU, test::adam_states());
  expect_error(ExitCode::kNoCheckpoint, {"which this model has not"}, [&] { load_checkpoint(saved.path(10), one); });
}

TEST(LoadCheckpoint, PrecisionsWithEqualMastersInterchange) {
  Saved saved({10});  // bf16
  Model fp32(tiny_config(), Precision::kFp32), fp64(tiny_config(), Precision::kFp64);
  load_checkpoint(saved.path(10), fp32.store);
  for (ParamId id = 0; id < fp32.store.size(); ++id)
    EXPECT_TRUE(fp32.store.master(id).equal(saved.model.store.master(id)));
  expect_error(ExitCode::kNoCheckpoint, {"32 bits", "64"}, [&] { load_checkpoint(saved.path(10), fp64.store); });
}

TEST(LoadCheckpoint, WithoutAnOptimizerTakesTheWeightsOnly) {
  Saved saved({10});
  ParameterStore store;
  const cram::Model model(tiny_config(), store);
  store.allocate(Precision::kBf16, at::kCPU);
  load_checkpoint(saved.path(10), store);
  for (ParamId id = 0; id < store.size(); ++id) EXPECT_TRUE(store.weight(id).equal(saved.model.store.weight(id)));
}

}  // namespace
}  // namespace cram
