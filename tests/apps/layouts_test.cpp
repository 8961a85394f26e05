// Several ranks train the same run as one: same losses, same weights, same samples.
#include <gtest/gtest.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>

#include "eval/loaded_model.h"
#include "support/tiny_corpus.h"

namespace cram::test {
namespace {

const std::vector<std::pair<std::string, std::string>> kMpiEnvironment = {
    {"OMPI_ALLOW_RUN_AS_ROOT", "1"}, {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"}, {"OMPI_MCA_mpi_yield_when_idle", "1"}};

std::vector<std::string> on_ranks(int ranks, const std::vector<std::string>& argv) {
  std::vector<std::string> all = {"/usr/bin/env", "mpirun", "--oversubscribe",    "--bind-to",
                                  "none",         "-np",    std::to_string(ranks)};
  all.push_back(std::string(CRAM_PROGRAM_DIR) + "/" + argv[0]);
  all.insert(all.end(), argv.begin() + 1, argv.end());
  return all;
}

std::vector<std::string> small_batches(const std::string& output, std::vector<std::string> more) {
  std::vector<std::string> argv =
      tiny_train(output, {"train.batch_quantum=64", "train.micro_batch_size=8", "model.heads=4"});
  argv.insert(argv.end(), more.begin(), more.end());
  return argv;
}

// All masters of the newest checkpoint as one fp64 vector, whatever layout wrote it.
at::Tensor masters(const std::string& run_folder) {
  // Precision and moments do not matter here; the masters are read in the format they were saved in.
  const bool fp64 = run_folder.find("fp64") != std::string::npos;
  const LoadedModel model = load_model(run_folder, fp64 ? Precision::kFp64 : Precision::kFp32, at::Device(at::kCPU));
  std::vector<at::Tensor> all;
  for (ParamId id = 0; id < model.store->size(); ++id) all.push_back(model.store->master(id).flatten().to(at::kDouble));
  return at::cat(all);
}

double worst_difference(const at::Tensor& a, const at::Tensor& b) { return (a - b).abs().max().item<double>(); }

// Largest relative differences of loss and gradient norm over all steps.
std::pair<double, double> compare_logs(const std::string& one, const std::string& other, std::size_t steps) {
  const auto a = metrics(one, "train"), b = metrics(other, "train");
  EXPECT_EQ(a.size(), steps);
  EXPECT_EQ(b.size(), steps);
  double loss = 0, norm = 0;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const auto relative = [&](const char* key) {
      const double x = a[i].at(key).get<double>(), y = b[i].at(key).get<double>();
      return std::abs(x - y) / std::abs(x);
    };
    loss = std::max(loss, relative("loss"));
    norm = std::max(norm, relative("grad_norm"));
    for (const char* key : {"step", "lr", "batch_size", "tokens"}) EXPECT_EQ(a[i].at(key), b[i].at(key)) << key;
  }
  return {loss, norm};
}

struct LayoutCase {
  const char* name;
  int ranks;
  int tensor;
};
constexpr LayoutCase kLayouts[] = {{"dp2", 2, 1}, {"tp2", 2, 2}, {"dp2tp2", 4, 2}, {"tp4", 4, 4}, {"dp4", 4, 1}};

TEST(Layouts, TwentyStepsEqualOneRank) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  struct Row {
    const char* precision;
    double loss, norm, weights;
  };
  for (const Row& row : {Row{"fp64", 1e-12, 1e-10, 1e-9}, Row{"fp32", 1e-5, 1e-4, 1e-4}}) {
    const std::vector<std::string> more = {"train.budget=20steps", std::string("train.precision=") + row.precision};
    const std::string one = out / (std::string(row.precision) + "-1");
    const ProgramResult alone = run_program(small_batches(one, more), where);
    ASSERT_EQ(alone.exit_code, 0) << alone.out;
    for (const LayoutCase& layout : kLayouts) {
      const std::string label = std::string(row.precision) + "-" + layout.name;
      std::vector<std::string> argv = small_batches(out / label, more);
      argv.push_back("parallel.tensor=" + std::to_string(layout.tensor));
      const ProgramResult together = run_program(on_ranks(layout.ranks, argv), where, 100, kMpiEnvironment);
      ASSERT_EQ(together.exit_code, 0) << together.out;
      const auto [loss, norm] = compare_logs(one, out / label, 20);
      const double weights = worst_difference(masters(one), masters(out / label));
      std::printf("%s: loss %.1e, gradient norm %.1e, parameters %.1e\n", label.c_str(), loss, norm, weights);
      EXPECT_LE(loss, row.loss) << label;
      EXPECT_LE(norm, row.norm) << label;
      EXPECT_LE(weights, row.weights) << label;
      EXPECT_NEAR(metrics(one, "summary").back().at("eval_loss").get<double>(),
                  metrics(out / label, "summary").back().at("eval_loss").get<double>(), row.loss * 10);
      EXPECT_EQ(metrics(one, "summary").back().at("eval_accuracy"),
                metrics(out / label, "summary").back().at("eval_accuracy"));
    }
    // Negative control: another seed is far outside every tolerance.
    std::vector<std::string> other_seed = more;
    other_seed.emplace_back("run.seed=1");
    const std::string other = out / (std::string(row.precision) + "-seed1");
    ASSERT_EQ(run_program(small_batches(other, other_seed), where).exit_code, 0);
    EXPECT_GT(compare_logs(one, other, 20).first, 100 * row.loss);
  }
}

TEST(Layouts, SameOneTwiceIsBitEqualAndAnyResumesAnother) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  const auto run = [&](const LayoutCase& layout, const std::string& name, const std::string& extra = "") {
    std::vector<std::string> argv = small_batches(out / name, {"train.budget=12steps", "train.precision=fp64",
                                                               "parallel.tensor=" + std::to_string(layout.tensor)});
    if (!extra.empty()) argv.push_back(extra);
    const ProgramResult result =
        run_program(layout.ranks == 1 ? argv : on_ranks(layout.ranks, argv), where, 100, kMpiEnvironment);
    EXPECT_EQ(result.exit_code, 0) << result.out;
  };
  const LayoutCase one{"1", 1, 1};
  run(kLayouts[2], "fp64-a");
  run(kLayouts[2], "fp64-b");
  EXPECT_EQ(loss_log(out / "fp64-a"), loss_log(out / "fp64-b"));
  EXPECT_EQ(worst_difference(masters(out / "fp64-a"), masters(out / "fp64-b")), 0);
  // Each tensor rank wrote its file; the position is one number for all ranks, so another layout reads on.
  EXPECT_TRUE(std::filesystem::exists(out / "fp64-a/checkpoints/step-000000012/rank-00001.h5"));
  run(kLayouts[2], "fp64-c", "run.stop_after=3steps");
  run(one, "fp64-c", "run.stop_after=6steps");
  run(kLayouts[3], "fp64-c", "run.stop_after=9steps");
  run(kLayouts[0], "fp64-c");
  EXPECT_LE(compare_logs(out / "fp64-a", out / "fp64-c", 12).first, 1e-12);
  EXPECT_LE(worst_difference(masters(out / "fp64-a"), masters(out / "fp64-c")), 1e-9);
}

TEST(Layouts, SizesThatCannotShareTheModelAreRefused) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  std::vector<std::string> argv = small_batches(out / "r", {"train.budget=2steps", "parallel.tensor=3"});
  const ProgramResult heads = run_program(on_ranks(3, argv), where, 60, kMpiEnvironment);
  EXPECT_EQ(heads.exit_code, 2) << heads.out;
  EXPECT_NE(heads.out.find("legal sizes: 1, 2, 4"), std::string::npos) << heads.out;
  argv.back() = "parallel.tensor=2";
  const ProgramResult world = run_program(on_ranks(3, argv), where, 60, kMpiEnvironment);
  EXPECT_EQ(world.exit_code, 2) << world.out;
  EXPECT_NE(world.out.find("3 ranks cannot be parallel.tensor=2"), std::string::npos) << world.out;
  EXPECT_FALSE(std::filesystem::exists(out / "r"));
}

TEST(Layouts, IllegalBatchesAreRefusedWithTheNumbers) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  const ProgramResult result =
      run_program(on_ranks(3, small_batches(out / "r", {"train.budget=2steps"})), where, 60, kMpiEnvironment);
  EXPECT_EQ(result.exit_code, 2) << result.out;
  EXPECT_NE(result.out.find("3 data ranks"), std::string::npos) << result.out;
  EXPECT_FALSE(std::filesystem::exists(out / "r"));
}

TEST(Layouts, ASignalToOneRankSavesOnAll) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  const std::vector<std::string> argv = small_batches(out / "r", {"train.budget=100000steps", "log.every=1steps"});
  RunningProgram program(on_ranks(2, argv), where, kMpiEnvironment);
  ASSERT_TRUE(program.wait_for_output("| step 5 ")) << program.output_so_far();
  program.send(SIGUSR1);  // mpirun forwards it to every rank
  const ProgramResult result = program.wait(30);
  EXPECT_EQ(result.exit_code, 75) << result.out;
  EXPECT_NE(result.out.find(": saving step "), std::string::npos) << result.out;
  EXPECT_FALSE(checkpoints(out / "r").empty());
}

// The launch script turns TERM into USR1, because mpirun would kill the ranks within a second.
TEST(Layouts, TheLocalLauncherPassesSignalsAndExitCodes) {
  const std::string source = CRAM_SOURCE_DIR;
  if (std::string(CRAM_PROGRAM_DIR) != source + "/build/bin")
    GTEST_SKIP() << "launch/run_local.sh starts the release build";
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  const auto launch = [&](const std::string& ranks, const std::vector<std::string>& argv) {
    std::vector<std::string> all = {source + "/launch/run_local.sh", ranks};
    all.insert(all.end(), argv.begin() + 1, argv.end());
    return all;
  };
  RunningProgram program(launch("2", small_batches(out / "r", {"train.budget=100000steps", "log.every=1steps"})),
                         where);
  ASSERT_TRUE(program.wait_for_output("| step 5 ")) << program.output_so_far();
  program.send(SIGTERM);
  const ProgramResult result = program.wait(30);
  EXPECT_EQ(result.exit_code, 75) << result.out;
  EXPECT_FALSE(checkpoints(out / "r").empty());
  EXPECT_EQ(run_program(launch("0", {"cram_train"}), where).exit_code, 2);
  EXPECT_EQ(run_program(launch("2", {"cram_train", "train.lr=x"}), where, 30).exit_code, 2);
}

TEST(Layouts, ARankThatFailsEndsTheJob) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  RunningProgram program(on_ranks(4, small_batches(out / "r", {"train.budget=100000steps", "log.every=1steps"})), where,
                         kMpiEnvironment);
  ASSERT_TRUE(program.wait_for_output("| step 3 ")) << program.output_so_far();
  // One of the four, by the folder's name in its command line.
  const ProgramResult killed =
      run_program({"/bin/sh", "-c", "kill -9 $(pgrep -f 'bin/[c]ram_train.*" + (out / "r") + "' | tail -n 1)"}, where);
  EXPECT_EQ(killed.exit_code, 0) << killed.out;
  const ProgramResult result = program.wait(10);
  EXPECT_NE(result.exit_code, 0) << result.out;
  EXPECT_NE(result.exit_code, -1) << "the job went on";
  const ProgramResult left = run_program({"/bin/sh", "-c", "pgrep -f '[c]ram_train.*" + (out / "r") + "'"}, where);
  EXPECT_NE(left.exit_code, 0) << "still running: " << left.out;
}

}  // namespace
}  // namespace cram::test
