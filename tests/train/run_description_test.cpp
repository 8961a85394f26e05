// What a run is resolved to on several ranks: agreement, refusals, what counts as changed, and the folder's states.
#include "train/run_description.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "run/run_folder.h"
#include "support/expect_error.h"
#include "support/temporary_folder.h"
#include "support/thread_ranks.h"

namespace cram::test {
namespace {

DeviceChoice proposal(Precision precision, int threads, const std::string& host = "node1") {
  DeviceChoice choice;
  choice.precision = precision;
  choice.threads = threads;
  choice.host = host;
  choice.precision_reason = precision == Precision::kBf16 ? "AVX512-BF16 found" : "no bf16 matrix unit found";
  return choice;
}

TEST(RunDescription, RanksTakeTheFewestThreadsThatOneProposes) {
  std::vector<int> threads(3);
  const auto messages = run_ranks(3, [&](Communicator& world) {
    const int own[] = {8, 3, 5};
    threads[static_cast<std::size_t>(world.rank())] =
        agree_on_device(proposal(Precision::kFp32, own[world.rank()]), world).threads;
  });
  EXPECT_EQ(messages, std::vector<std::string>(3));
  EXPECT_EQ(threads, (std::vector<int>{3, 3, 3}));
}

TEST(RunDescription, AnAutomaticPrecisionThatDiffersIsRefusedOnAllRanks) {
  std::vector<ExitCode> codes(3, ExitCode::kOk);
  std::vector<std::string> what(3);
  (void)run_ranks(3, [&](Communicator& world) {
    const auto rank = static_cast<std::size_t>(world.rank());
    try {
      (void)agree_on_device(rank == 2 ? proposal(Precision::kFp32, 4, "node7") : proposal(Precision::kBf16, 4), world);
    } catch (const Error& error) {
      codes[rank] = error.code();
      what[rank] = error.what();
    }
  });
  EXPECT_EQ(codes, std::vector<ExitCode>(3, ExitCode::kUsage));
  for (const char* part : {"train.precision", "fp32 on rank 2", "node7", "bf16 on rank 0", "give the value"}) {
    EXPECT_NE(what[0].find(part), std::string::npos) << part << " in " << what[0];
  }
}

TEST(RunDescription, AnotherKindOfDeviceIsRefused) {
  std::vector<std::string> what(2);
  (void)run_ranks(2, [&](Communicator& world) {
    DeviceChoice own = proposal(Precision::kBf16, 4);
    if (world.rank() == 1) own.device = at::Device(at::kCUDA, 0);
    try {
      (void)agree_on_device(own, world);
    } catch (const Error& error) {
      what[static_cast<std::size_t>(world.rank())] = error.what();
    }
  });
  EXPECT_NE(what[0].find("run.device=auto is cuda on rank 1"), std::string::npos) << what[0];
  EXPECT_FALSE(what[1].empty());
}

TEST(RunDescription, RanksWithOtherSettingsAreNamed) {
  std::vector<std::string> what(2);
  (void)run_ranks(2, [&](Communicator& world) {
    Config config;
    OptionTable options;
    add_train_options(options, config);
    if (world.rank() == 1) options.apply_override("train.precision=fp32");
    try {
      check_started_alike(world, options, "abc");
    } catch (const Error& error) {
      what[static_cast<std::size_t>(world.rank())] = error.what();
    }
  });
  EXPECT_NE(what[0].find("train.precision: rank 1 has fp32, rank 0 auto"), std::string::npos) << what[0];
}

TEST(RunDescription, WhatIsGivenStaysAsGiven) {
  Config given;
  OptionTable options;
  add_train_options(options, given);
  const std::map<std::string, std::string> before = options.values();
  const RunDescription run =
      resolve_run(given, Layout{}, {4096, 128, "folder", "digest"}, {.processors = 3}, *make_self_communicator());
  EXPECT_EQ(options.values(), before);
  EXPECT_EQ(run.config.model.vocab_size, 4096);
  EXPECT_EQ(run.config.run.threads, 3);
  EXPECT_NE(run.config.train.precision, "auto");
  const auto resolved = resolved_values(options, run.config);
  EXPECT_EQ(resolved.at("model.seq_length"), "128");
  EXPECT_EQ(resolved.at("train.clock"), "wall");
  EXPECT_EQ(resolved.count("train.lr"), 0U);
  expect_error(ExitCode::kUsage, {"model.vocab_size=100", "4096"}, [&] {
    Config other = given;
    other.model.vocab_size = 100;
    (void)resolve_run(other, Layout{}, {4096, 128, "folder", "digest"}, {}, *make_self_communicator());
  });
}

// A command finds the run of a program that had fewer options; another value than their default is a change.
TEST(RunDescription, OptionsThatCameLaterCountAsTheirDefault) {
  Config config;
  OptionTable options;
  add_train_options(options, config);
  std::map<std::string, std::string> now = settings_of(config), saved = now;
  ASSERT_EQ(saved.erase("train.optimizer"), 1U);
  EXPECT_TRUE(changed_settings(saved, options, now).empty());
  const std::string path = default_run_path(options, now);
  now["train.optimizer"] = "another";
  EXPECT_EQ(changed_settings(saved, options, now).size(), 1U);
  EXPECT_NE(default_run_path(options, now), path);
}

TEST(RunFolder, TheShellOfAKilledStartIsANewRunAndNothingElseIs) {
  const TemporaryFolder out;
  const auto touch = [&](const std::string& name) {
    std::filesystem::create_directories(std::filesystem::path(out / name).parent_path());
    std::ofstream(out / name) << "x";
  };
  touch("r/logs/rank-00000.log");
  touch("r/logs/stuck-rank-1");
  touch("r/environment.json");
  touch("r/config.toml.tmp-12");
  EXPECT_TRUE(RunFolder(out / "r").is_new());
  touch("r/metrics.jsonl");
  expect_error(ExitCode::kNoCheckpoint, {"not a run folder"}, [&] { (void)RunFolder(out / "r"); });
}

TEST(RunFolder, ConfigTomlIsAsGivenAndComesWithWhatItBecame) {
  const TemporaryFolder out;
  Config config;
  OptionTable options;
  add_train_options(options, config);
  RunFolder folder(out / "r");
  folder.lock();
  folder.open();
  EXPECT_FALSE(std::filesystem::exists(out / "r/config.toml"));
  folder.describe(options, {{"host", "here"}}, {{"train.precision", "bf16"}});
  std::ifstream toml(out / "r/config.toml"), json(out / "r/environment.json");
  const std::string given((std::istreambuf_iterator<char>(toml)), {}),
      found((std::istreambuf_iterator<char>(json)), {});
  EXPECT_NE(given.find("precision = \"auto\""), std::string::npos) << given;
  EXPECT_NE(found.find("\"train.precision\": \"bf16\""), std::string::npos) << found;
}

}  // namespace
}  // namespace cram::test
