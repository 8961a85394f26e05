// Exact resume: the same command goes on where it stopped, bit for bit.
#include <gtest/gtest.h>

#include <algorithm>

#include "base/digest.h"
#include "base/hdf5_file.h"
#include "support/tiny_corpus.h"

namespace cram::test {
namespace {

// Rank file of the newest checkpoint: masters and moments.
std::string weights_digest(const std::string& run_folder) {
  const std::vector<std::string> names = checkpoints(run_folder);
  EXPECT_FALSE(names.empty());
  std::string all;
  const ArrayFileReader reader(run_folder + "/checkpoints/" + names.back() + "/rank-00000.h5", ExitCode::kOther);
  for (const char* kind : {"master", "exp_avg", "exp_avg_sq"}) {
    for (const char* name :
         {"encoder.embedding.word_embedding.weight", "encoder.embedding.pos_embedding.scale_factor",
          "encoder.layers.0.attn.self_attention.query_key_value.weight", "encoder.layers.1.ffn.dense_in.weight",
          "encoder.layers.1.norm2.bias", "encoder.final_norm.weight"}) {
      const std::string path = std::string("/") + kind + "/" + name;
      const ArrayInfo info = reader.info(path);
      std::size_t bytes = array_item_bytes(info.type);
      for (const std::int64_t extent : info.shape) bytes *= static_cast<std::size_t>(extent);
      std::vector<char> data(bytes);
      reader.read(path, info, data.data());
      all += digest_bytes(data.data(), data.size());
    }
  }
  return digest_text(all);
}

std::vector<std::string> with(std::vector<std::string> argv, const std::string& more) {
  argv.push_back(more);
  return argv;
}

void expect_exit(int expected, const ProgramResult& result) { ASSERT_EQ(result.exit_code, expected) << result.out; }

class Resume : public testing::TestWithParam<const char*> {};

// 1,188 or so train rows and 128 rows a step: 20 steps pass the end of epoch 1 twice.
TEST_P(Resume, TwentyStepsEqualTenAndTen) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  const std::string precision = std::string("train.precision=") + GetParam();
  const std::vector<std::string> whole = tiny_train(out / "whole", {"train.budget=20steps", precision});
  const std::vector<std::string> parts = tiny_train(out / "parts", {"train.budget=20steps", precision});
  expect_exit(0, run_program(whole, where));
  expect_exit(0, run_program(with(parts, "run.stop_after=7steps"), where));  // in the middle of epoch 1
  EXPECT_EQ(loss_log(out / "parts").size(), 7U);
  expect_exit(0, run_program(with(parts, "run.stop_after=13steps"), where));  // past it
  expect_exit(0, run_program(parts, where));
  EXPECT_EQ(loss_log(out / "whole").size(), 20U);
  EXPECT_EQ(loss_log(out / "whole"), loss_log(out / "parts"));
  EXPECT_EQ(weights_digest(out / "whole"), weights_digest(out / "parts"));
  EXPECT_EQ(metrics(out / "whole", "summary").back().at("eval_loss"),
            metrics(out / "parts", "summary").back().at("eval_loss"));
}

TEST_P(Resume, SameSeedSameNumbersOtherSeedOthers) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  const std::string precision = std::string("train.precision=") + GetParam();
  expect_exit(0, run_program(tiny_train(out / "a", {"train.budget=6steps", precision}), where));
  expect_exit(0, run_program(tiny_train(out / "b", {"train.budget=6steps", precision}), where));
  expect_exit(0, run_program(tiny_train(out / "c", {"train.budget=6steps", precision, "run.seed=1"}), where));
  EXPECT_EQ(loss_log(out / "a"), loss_log(out / "b"));
  EXPECT_EQ(weights_digest(out / "a"), weights_digest(out / "b"));
  EXPECT_NE(loss_log(out / "a"), loss_log(out / "c"));
}

INSTANTIATE_TEST_SUITE_P(Precisions, Resume, testing::Values("fp32", "bf16"),
                         [](const auto& parameter) { return std::string(parameter.param); });

TEST(VirtualClock, TimeScheduleResumesBitEqual) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  const std::vector<std::string> clock = {"train.budget=50s", "train.clock=virtual:2.5", "train.precision=fp32"};
  expect_exit(0, run_program(tiny_train(out / "whole", clock), where));
  const std::vector<std::string> parts = tiny_train(out / "parts", clock);
  expect_exit(0, run_program(with(parts, "run.stop_after=9steps"), where));
  expect_exit(0, run_program(parts, where));
  EXPECT_EQ(loss_log(out / "whole").size(), 20U);
  EXPECT_EQ(loss_log(out / "whole"), loss_log(out / "parts"));
}

TEST(ReplayClock, RepeatsAWallClockRun) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  expect_exit(0, run_program(tiny_train(out / "wall", {"train.budget=2s", "train.precision=fp32"}), where));
  expect_exit(0, run_program(tiny_train(out / "again", {"train.budget=2s", "train.precision=fp32",
                                                        "train.clock=replay:" + (out / "wall/clock.log")}),
                             where));
  EXPECT_GT(loss_log(out / "wall").size(), 3U);
  EXPECT_EQ(loss_log(out / "wall"), loss_log(out / "again"));
}

// Step k uses the budget consumed before it: (k-1)/10 of it with a budget of 10 steps.
TEST(Schedule, FollowsTheBudgetConsumedBeforeAStep) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  expect_exit(0, run_program(tiny_train(out / "r", {"train.budget=10steps", "train.batch_quantum=64", "train.lr=1e-2"}),
                             where));
  const auto steps = metrics(out / "r", "train");
  ASSERT_EQ(steps.size(), 10U);
  // triangle2: 0.25 + t up to t = 0.75, then (1 - t)/0.25; ramp: one quantum of 64 until half of 0.6, two after.
  const double factors[] = {0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95, 0.8, 0.4};
  const std::int64_t batches[] = {64, 64, 64, 128, 128, 128, 128, 128, 128, 128};
  std::int64_t tokens = 0;
  for (std::size_t i = 0; i < 10; ++i) {
    EXPECT_NEAR(steps[i].at("lr").get<double>(), 1e-2 * factors[i], 1e-15) << i;
    EXPECT_EQ(steps[i].at("batch_size"), batches[i]) << i;
    tokens += batches[i] * 32;
    EXPECT_EQ(steps[i].at("tokens"), tokens) << i;
  }
}

TEST(MicroBatch, DoesNotChangeTheNumbersBeyondRounding) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  for (const char* size : {"128", "64", "8"}) {
    expect_exit(0, run_program(tiny_train(out / size, {"train.budget=5steps", "train.precision=fp64",
                                                       std::string("train.micro_batch_size=") + size}),
                               where));
  }
  const auto one = metrics(out / "128", "train");
  for (const char* size : {"64", "8"}) {
    const auto other = metrics(out / size, "train");
    ASSERT_EQ(one.size(), other.size());
    for (std::size_t i = 0; i < one.size(); ++i) {
      EXPECT_NEAR(one[i].at("loss").get<double>(), other[i].at("loss").get<double>(), 1e-11);
      EXPECT_NEAR(one[i].at("grad_norm").get<double>(), other[i].at("grad_norm").get<double>(), 1e-10);
    }
  }
}

TEST(Resume, ChangedSettingsAreRefusedWithoutForce) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  const std::vector<std::string> run = tiny_train(out / "r", {"train.budget=8steps"});
  expect_exit(0, run_program(with(run, "run.stop_after=4steps"), where));
  const ProgramResult refused = run_program(with(run, "train.lr=5e-3"), where);
  expect_exit(2, refused);
  EXPECT_NE(refused.out.find("train.lr: the run has 0.002, this command 0.005"), std::string::npos) << refused.out;
  EXPECT_EQ(loss_log(out / "r").size(), 4U);
  std::vector<std::string> forced = with(run, "train.lr=5e-3");
  forced.emplace_back("--force");
  expect_exit(0, run_program(forced, where));
  EXPECT_EQ(loss_log(out / "r").size(), 8U);
}

// What --force asked for and the checkpoint cannot hold leaves the run as it was.
TEST(Resume, ARefusedForceLeavesTheConfigurationAlone) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  const std::vector<std::string> run = tiny_train(out / "r", {"train.budget=8steps"});
  expect_exit(0, run_program(with(run, "run.stop_after=4steps"), where));
  const auto hidden = [&] {
    std::ifstream config(out / "r/config.toml");
    const std::string text((std::istreambuf_iterator<char>(config)), {});
    const std::size_t at = text.find("\nhidden = ");
    return at == std::string::npos ? text : text.substr(at + 10, text.find(' ', at + 10) - at - 10);
  };
  ASSERT_EQ(hidden(), "64");
  std::vector<std::string> forced = with(run, "model.hidden=96");
  forced.emplace_back("--force");
  expect_exit(20, run_program(forced, where));
  EXPECT_EQ(hidden(), "64");
  expect_exit(0, run_program(run, where));
  EXPECT_EQ(loss_log(out / "r").size(), 8U);
}

TEST(Resume, AStartThatWasKilledBeforeItWasARunIsStartedOver) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  const std::vector<std::string> run = tiny_train(out / "r", {"train.budget=2steps"});
  std::filesystem::create_directories(out / "r/logs");
  std::ofstream(out / "r/logs/rank-00000.log") << "started\n";
  expect_exit(0, run_program(run, where));
  EXPECT_EQ(loss_log(out / "r").size(), 2U);
}

TEST(Resume, DamagedNewestIsSetAside) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  const std::vector<std::string> run = tiny_train(out / "r", {"train.budget=12steps", "checkpoint.every=4steps"});
  expect_exit(0, run_program(tiny_train(out / "whole", {"train.budget=12steps"}), where));
  expect_exit(0, run_program(with(run, "run.stop_after=8steps"), where));
  {
    std::fstream file(out / "r/checkpoints/step-000000008/rank-00000.h5",
                      std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(5000);
    file.put('\x5a');
  }
  const ProgramResult resumed = run_program(run, where);
  expect_exit(0, resumed);
  EXPECT_NE(resumed.out.find("set aside"), std::string::npos) << resumed.out;
  EXPECT_NE(resumed.out.find("digest"), std::string::npos) << resumed.out;
  EXPECT_TRUE(std::filesystem::exists(out / "r/checkpoints/step-000000008.damaged"));
  EXPECT_EQ(loss_log(out / "whole"), loss_log(out / "r"));
}

TEST(Resume, AllDamagedIsExit20AndFreshKeepsTheOldRun) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  const std::vector<std::string> run = tiny_train(out / "r", {"train.budget=4steps"});
  expect_exit(0, run_program(with(run, "run.stop_after=2steps"), where));
  std::filesystem::resize_file(out / "r/checkpoints/step-000000002/rank-00000.h5", 100);
  const ProgramResult refused = run_program(run, where);
  expect_exit(20, refused);
  EXPECT_NE(refused.out.find("--fresh"), std::string::npos) << refused.out;
  std::vector<std::string> fresh = run;
  fresh.emplace_back("--fresh");
  expect_exit(0, run_program(fresh, where));
  EXPECT_EQ(loss_log(out / "r").size(), 4U);
  EXPECT_TRUE(std::filesystem::exists(out / "r.old-1/checkpoints/step-000000002/manifest.json"));
}

TEST(Resume, ForeignFolderIsExit20) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  std::ofstream(out / "notes.txt") << "mine";
  const ProgramResult refused = run_program(tiny_train(out.path().string(), {"train.budget=2steps"}), where);
  expect_exit(20, refused);
  EXPECT_FALSE(std::filesystem::exists(out / "config.toml"));
}

TEST(Resume, KilledRunsGoOnFromTheLastCommit) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  const std::vector<std::string> run =
      tiny_train(out / "r", {"train.budget=40steps", "checkpoint.every=10steps", "log.every=1steps"});
  expect_exit(0, run_program(tiny_train(out / "whole", {"train.budget=40steps"}), where));
  for (const char* killed_at : {"| step 4 ", "| step 13 ", "| step 27 "}) {  // the first before any commit
    RunningProgram program(run, where);
    ASSERT_TRUE(program.wait_for_output(killed_at)) << program.output_so_far();
    program.send(SIGKILL);
    EXPECT_EQ(program.wait().exit_code, 128 + SIGKILL);
  }
  // A write that the kill tore apart.
  std::ofstream(out / "r/metrics.jsonl", std::ios::app) << R"({"kind":"train","st)";
  expect_exit(0, run_program(run, where));
  EXPECT_EQ(loss_log(out / "whole"), loss_log(out / "r"));
  EXPECT_EQ(weights_digest(out / "whole"), weights_digest(out / "r"));
  EXPECT_EQ(metrics(out / "r", "train").back().at("attempt"), 3);
}

TEST(Resume, FinishedRunIsNotTrainedFurther) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  const std::vector<std::string> run = tiny_train(out / "r", {"train.budget=3steps"});
  expect_exit(0, run_program(run, where));
  expect_exit(0, run_program(run, where));
  EXPECT_EQ(metrics(out / "r", "train").size(), 3U);
  std::vector<std::string> longer = tiny_train(out / "r", {"train.budget=5steps"});
  expect_exit(2, run_program(longer, where));
  longer.emplace_back("--force");
  expect_exit(0, run_program(longer, where));
  EXPECT_EQ(metrics(out / "r", "train").size(), 5U);
}

// Measured once, remembered for this device and model, stored with the run, not measured again on a resume; and the run
// is the one of the chosen number.
TEST(AutomaticMicroBatch, IsMeasuredOnceAndStored) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  const std::vector<std::pair<std::string, std::string>> home = {{"XDG_CACHE_HOME", out / "cache"}};
  const std::vector<std::string> more = {"train.micro_batch_size=auto", "train.budget=6steps", "run.stop_after=3steps",
                                         "train.precision=fp64"};
  const ProgramResult first = run_program(tiny_train(out / "a", more), where, 100, home);
  ASSERT_EQ(first.exit_code, 0) << first.out;
  EXPECT_NE(first.out.find("outside the budget"), std::string::npos) << first.out;
  std::ifstream config(out / "a/config.toml"), environment(out / "a/environment.json");
  const std::string text((std::istreambuf_iterator<char>(config)), {});
  EXPECT_NE(text.find("\nmicro_batch_size = \"auto\""), std::string::npos) << "as given: " << text;
  const auto found = nlohmann::json::parse(environment);
  const int chosen = std::stoi(found.at("resolved").at("train.micro_batch_size").get<std::string>());
  EXPECT_GE(chosen, 8);
  EXPECT_EQ(128 % chosen, 0);

  const ProgramResult second = run_program(tiny_train(out / "b", more), where, 100, home);
  EXPECT_NE(second.out.find("measured before for this device and model"), std::string::npos) << second.out;
  // Elsewhere it would be measured; the run knows its own.
  std::vector<std::string> rest = more;
  rest[2] = "run.stop_after=6steps";
  const ProgramResult resumed =
      run_program(tiny_train(out / "a", rest), where, 100, {{"XDG_CACHE_HOME", out / "another"}});
  ASSERT_EQ(resumed.exit_code, 0) << resumed.out;
  EXPECT_NE(resumed.out.find("the run's own is " + std::to_string(chosen)), std::string::npos) << resumed.out;
  EXPECT_FALSE(std::filesystem::exists(out / "another"));
  // What a later command with another size is compared with.
  const nlohmann::json manifest =
      nlohmann::json::parse(std::ifstream(out / "a/checkpoints/step-000000006/manifest.json"));
  EXPECT_EQ(manifest.at("environment").at("micro_batch_size").get<std::string>(), std::to_string(chosen));

  std::vector<std::string> named = rest;
  named[0] = "train.micro_batch_size=" + std::to_string(chosen);
  ASSERT_EQ(run_program(tiny_train(out / "c", named), where).exit_code, 0);
  EXPECT_EQ(loss_log(out / "a"), loss_log(out / "c")) << "the search left something behind";
}

TEST(AutomaticMicroBatch, ASignalEndsTheSearchAndLeavesNoSizeBehind) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  const std::vector<std::pair<std::string, std::string>> home = {{"XDG_CACHE_HOME", out / "cache"}};
  const std::vector<std::string> run =
      tiny_train(out / "r", {"train.micro_batch_size=auto", "train.budget=4steps", "train.precision=fp64"});
  RunningProgram program(run, where, home);
  ASSERT_TRUE(program.wait_for_output("measuring sizes from 8 to 128")) << program.output_so_far();
  program.send(SIGTERM);
  const ProgramResult ended = program.wait();
  EXPECT_EQ(ended.exit_code, 75) << ended.out;
  EXPECT_NE(ended.out.find("interrupted, nothing is remembered"), std::string::npos) << ended.out;
  EXPECT_FALSE(std::filesystem::exists(out / "cache/cram"));
  const ProgramResult resumed = run_program(run, where, 100, home);
  EXPECT_EQ(resumed.exit_code, 0) << resumed.out;
  EXPECT_NE(resumed.out.find("outside the budget"), std::string::npos) << resumed.out;
}

}  // namespace
}  // namespace cram::test
