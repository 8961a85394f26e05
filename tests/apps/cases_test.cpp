// Commands from people's fault reports, with the behaviour they should have met. Numbers are the reports' own.
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/mount.h>

#include <chrono>
#include <thread>

#include "support/tiny_corpus.h"

namespace cram::test {
namespace {

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

void expect_refused(int code, const std::vector<std::string>& words, const ProgramResult& result) {
  EXPECT_EQ(result.exit_code, code) << result.out;
  EXPECT_LT(result.seconds, 10) << "a refusal should take a moment";  // 2 s on an idle machine
  for (const std::string& word : words)
    EXPECT_TRUE(contains(result.out, word)) << word << " is missing in: " << result.out;
}

TEST(Options, BadOptionsAreNamedAndNothingIsWritten) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  { std::ofstream(out / "bad.toml") << "[optim]\nlerning_rate = 0.001\n"; }
  const auto run = [&](const std::string& argument) {
    std::vector<std::string> argv = tiny_train(out / "r", {"train.budget=5steps"});
    argv.push_back(argument);
    return run_program(argv, where);
  };
  expect_refused(2, {"optim.lerning_rate", "train.lr", "bad.toml:2:"}, run("--config=" + (out / "bad.toml")));
  expect_refused(2, {"train.lerning_rate", "train.lr"}, run("train.lerning_rate=1e-3"));
  expect_refused(2, {"train.lr", "1e-3x"}, run("train.lr=1e-3x"));
  expect_refused(2, {"train.lr", "1,5"}, run("train.lr=1,5"));
  expect_refused(2, {"120000"}, run(std::string(120000, 'x')));
  expect_refused(2, {"12"}, run("train.lr=" + std::string(120000, '1')));
  expect_refused(2, {"--fresh"}, run("--frehs"));
  EXPECT_FALSE(std::filesystem::exists(out / "r"));
}

TEST(Shapes, VocabularyMismatchNamesBothSizes) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  const ProgramResult result =
      run_program(tiny_train(out / "r", {"model.vocab_size=400", "train.budget=5steps"}), where);
  expect_refused(2, {"400", "500", "tokenizer digest"}, result);
  EXPECT_FALSE(std::filesystem::exists(out / "r"));
}

TEST(SharedFolders, LockedAndReadOnlyShardsTrainTwiceAtOnce) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  std::vector<int> locks;
  for (const auto& entry : std::filesystem::directory_iterator(where + "/s")) {
    const int fd = ::open(entry.path().c_str(), O_RDONLY);
    ASSERT_EQ(::flock(fd, LOCK_EX), 0);
    locks.push_back(fd);
  }
  std::filesystem::permissions(where + "/s", std::filesystem::perms(0555));
  RunningProgram first(tiny_train(out / "a", {"train.budget=5steps"}), where);
  RunningProgram second(tiny_train(out / "b", {"train.budget=5steps"}), where);
  const ProgramResult a = first.wait();
  const ProgramResult b = second.wait();
  std::filesystem::permissions(where + "/s", std::filesystem::perms(0755));
  for (const int fd : locks) ::close(fd);
  EXPECT_EQ(a.exit_code, 0) << a.out;
  EXPECT_EQ(b.exit_code, 0) << b.out;
  EXPECT_EQ(loss_log(out / "a"), loss_log(out / "b"));
}

TEST(SharedFolders, TwoRunsInOneFolderAreToldApart) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  const std::vector<std::string> argv = tiny_train(out / "r", {"train.budget=100000steps", "log.every=1steps"});
  RunningProgram first(argv, where);
  ASSERT_TRUE(first.wait_for_output("| step 2 ")) << first.output_so_far();
  expect_refused(2, {"another process trains in", out / "r"}, run_program(argv, where));
  first.send(SIGTERM);
  EXPECT_EQ(first.wait(30).exit_code, 75);
}

TEST(Budget, WallBudgetEndsAfterTheStepInFlight) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  const double budget_s = 6;  // the report has 60; the rule is the same
  const ProgramResult result = run_program(tiny_train(out / "r", {"train.budget=6s"}), where);
  ASSERT_EQ(result.exit_code, 0) << result.out;
  const nlohmann::json summary = metrics(out / "r", "summary").back();
  const std::vector<nlohmann::json> steps = metrics(out / "r", "train");
  ASSERT_GT(steps.size(), 2U);
  EXPECT_EQ(summary.at("reason"), "budget");
  EXPECT_EQ(summary.at("steps"), steps.size());
  EXPECT_EQ(summary.at("lr_end"), 0.0);
  const double elapsed_s = summary.at("elapsed_s").get<double>();
  EXPECT_GE(elapsed_s, budget_s);
  // The last step began inside the budget.
  EXPECT_LT(steps[steps.size() - 2].at("elapsed_s").get<double>(), budget_s);
  EXPECT_LT(steps.back().at("lr").get<double>(), 0.05 * 2e-3);
  for (const char* word : {"stopped: budget", "steps", "tokens", "training clock", "start-up"}) {
    EXPECT_TRUE(contains(result.out, word)) << word << " is missing in: " << result.out;
  }
}

class StopSignal : public testing::TestWithParam<int> {};

TEST_P(StopSignal, SignalSavesAndTheSameCommandGoesOn) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  const std::vector<std::string> argv = tiny_train(out / "r", {"train.budget=100000steps", "log.every=1steps"});
  std::int64_t saved_step = 0;
  {
    RunningProgram program(argv, where);
    ASSERT_TRUE(program.wait_for_output("| step 5 ")) << program.output_so_far();
    program.send(GetParam());
    const ProgramResult result = program.wait(30);
    ASSERT_EQ(result.exit_code, 75) << result.out;
    EXPECT_TRUE(contains(result.out, ": saving step ")) << result.out;
    saved_step = metrics(out / "r", "summary").back().at("steps").get<std::int64_t>();
    EXPECT_GE(saved_step, 5);
  }
  RunningProgram again(argv, where);
  ASSERT_TRUE(again.wait_for_output("| step " + std::to_string(saved_step + 1) + " ")) << again.output_so_far();
  EXPECT_TRUE(contains(again.output_so_far(), "resuming after step " + std::to_string(saved_step)));
  // Two signals in a row leave at once, with the last commit intact.
  again.send(GetParam());
  again.send(SIGINT);
  EXPECT_EQ(again.wait(30).exit_code, 75);
  const nlohmann::json last = metrics(out / "r", "train").back();
  EXPECT_EQ(last.at("attempt"), 1);
}

INSTANTIATE_TEST_SUITE_P(Signals, StopSignal, testing::Values(SIGTERM, SIGINT, SIGUSR1), [](const auto& parameter) {
  return std::string(parameter.param == SIGTERM ? "TERM" : parameter.param == SIGINT ? "INT" : "USR1");
});

TEST(Storage, FullDiskKeepsEarlierCheckpointsAndIsNoSuccess) {
  if (::geteuid() != 0) GTEST_SKIP() << "mounting a small disk needs root";
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  std::filesystem::create_directories(out / "disk");
  if (::mount("none", (out / "disk").c_str(), "tmpfs", 0, "size=6m") != 0)
    GTEST_SKIP() << "no permission to mount a tmpfs";
  const ProgramResult result = run_program(
      tiny_train(out / "disk/r", {"train.budget=2000steps", "checkpoint.every=5steps", "checkpoint.keep=500"}), where);
  EXPECT_EQ(result.exit_code, 21) << result.out;
  EXPECT_TRUE(contains(result.out, "may not fit")) << result.out;  // the early warning, with bytes
  EXPECT_TRUE(contains(result.out, "checkpoints/step-")) << result.out;
  const std::vector<std::string> names = checkpoints(out / "disk/r");
  EXPECT_FALSE(names.empty());
  for (const std::string& name : names) EXPECT_FALSE(contains(name, ".tmp-")) << name;
  // Everything under a final name loads: give the disk room and go on.
  EXPECT_EQ(::mount("none", (out / "disk").c_str(), "tmpfs", MS_REMOUNT, "size=64m"), 0);
  const ProgramResult verified = run_program(
      [&] {
        std::vector<std::string> argv = tiny_train(out / "disk/r", {"train.budget=2000steps"});
        argv.emplace_back("--verify");
        return argv;
      }(),
      where);
  EXPECT_EQ(verified.exit_code, 0) << verified.out;
  EXPECT_EQ(::umount((out / "disk").c_str()), 0);
}

TEST(Recipe, ConfigFileListsEveryDefault) {
  std::ostringstream file;
  file << std::ifstream(std::string(CRAM_SOURCE_DIR) + "/configs/crammed-bert.toml").rdbuf();
  const ProgramResult defaults = run_program({"cram_train", "--print-config"}, ".");
  ASSERT_EQ(defaults.exit_code, 0);
  // The file is a few lines of comment, then what the program prints.
  const std::size_t start = file.str().find("[run]");
  ASSERT_NE(start, std::string::npos);
  EXPECT_EQ(file.str().substr(start), defaults.out);
  const ProgramResult from_file = run_program(
      {"cram_train", "--config", std::string(CRAM_SOURCE_DIR) + "/configs/crammed-bert.toml", "--print-config"}, ".");
  EXPECT_EQ(from_file.out, defaults.out);
}

TEST(DryRun, PrintsAndWritesNothing) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  std::vector<std::string> argv = tiny_train(out / "r", {"train.budget=2steps"});
  argv.emplace_back("--dry-run");
  const ProgramResult result = run_program(argv, where);
  EXPECT_EQ(result.exit_code, 0) << result.out;
  EXPECT_TRUE(contains(result.out, "nothing was allocated")) << result.out;
  EXPECT_FALSE(std::filesystem::exists(out / "r"));
}

TEST(DryRun, PlansForAGpuThatIsNotThere) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  const std::vector<std::pair<std::string, std::string>> no_gpu = {{"CUDA_VISIBLE_DEVICES", ""}};
  std::vector<std::string> argv = tiny_train(out / "r", {"run.device=cuda", "train.precision=auto"});
  EXPECT_EQ(run_program(argv, where, 100, no_gpu).exit_code, 2);
  argv.emplace_back("--dry-run");
  const ProgramResult plan = run_program(argv, where, 100, no_gpu);
  EXPECT_EQ(plan.exit_code, 0) << plan.out;
  EXPECT_TRUE(contains(plan.out, "cuda, not visible here") && contains(plan.out, "precision bf16")) << plan.out;
}

TEST(DryRun, RefusesARecordedGraphOnACpu) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  std::vector<std::string> argv = tiny_train(out / "r", {"run.device=cpu", "run.cuda_graph=on"});
  for (const char* kind : {"", "--dry-run"}) {
    if (*kind != '\0') argv.emplace_back(kind);
    const ProgramResult result = run_program(argv, where);
    EXPECT_EQ(result.exit_code, 2) << result.out;
    EXPECT_TRUE(contains(result.out, "run.cuda_graph=on is not possible")) << result.out;
    EXPECT_FALSE(std::filesystem::exists(out / "r"));
  }
}

TEST(Bench, RefusesWhatItDoesNotTake) {
  const auto refused = [](const std::vector<std::string>& arguments, const std::string& because) {
    std::vector<std::string> argv = {"cram_bench"};
    argv.insert(argv.end(), arguments.begin(), arguments.end());
    const ProgramResult result = run_program(argv, ".");
    EXPECT_EQ(result.exit_code, 2) << result.out;
    EXPECT_TRUE(contains(result.out, because)) << result.out;
  };
  refused({}, "which measurement?");
  refused({"steps"}, "no measurement is called steps");
  refused({"step", "gemm"}, "takes 0 names besides section.key=value, got 1: gemm");
  refused({"compare", "run"}, "takes 2 names");
  refused({"gemm", "--seconds", "2"}, "takes no --seconds");
  refused({"step", "model.seq_length=1"}, "masks no token");
  for (const char* seconds : {"0", "-1", "nan", "1e9"}) refused({"step", "--seconds", seconds}, "--seconds");
}

TEST(EveryProgram, HasHelpAndVersion) {
  for (const char* program : {"cram_data", "cram_train", "cram_export", "cram_bench"}) {
    const ProgramResult version = run_program({program, "--version"}, ".");
    EXPECT_EQ(version.exit_code, 0);
    EXPECT_TRUE(contains(version.out, "Apache-2.0") && contains(version.out, program)) << version.out;
    const ProgramResult help = run_program({program, "--help"}, ".");
    EXPECT_EQ(help.exit_code, 0);
    EXPECT_TRUE(contains(help.out, program)) << help.out;
    EXPECT_EQ(run_program({program, "--no-such-flag"}, ".").exit_code, 2);
  }
}

}  // namespace
}  // namespace cram::test
