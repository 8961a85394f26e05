// Several ranks train the same run as one: same losses, same weights, same samples.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "base/hdf5_file.h"
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
  std::vector<std::string> argv = tiny_train(output, {"train.batch_quantum=64", "train.micro_batch_size=8"});
  argv.insert(argv.end(), more.begin(), more.end());
  return argv;
}

std::vector<double> masters(const std::string& run_folder) {
  const ArrayFileReader reader(run_folder + "/checkpoints/" + checkpoints(run_folder).back() + "/rank-00000.h5",
                               ExitCode::kOther);
  std::vector<double> all;
  for (const char* name :
       {"encoder.embedding.word_embedding.weight", "encoder.embedding.pos_embedding.scale_factor",
        "encoder.layers.0.attn.self_attention.query_key_value.weight", "encoder.layers.1.ffn.dense_out.weight",
        "encoder.layers.0.norm1.bias", "encoder.final_norm.weight"}) {
    const std::string path = std::string("/master/") + name;
    const ArrayInfo info = reader.info(path);
    std::int64_t count = 1;
    for (const std::int64_t extent : info.shape) count *= extent;
    std::vector<double> values(static_cast<std::size_t>(count));
    if (info.type == ArrayType::kF64) {
      reader.read(path, info, values.data());
    } else {
      std::vector<float> narrow(values.size());
      reader.read(path, info, narrow.data());
      std::copy(narrow.begin(), narrow.end(), values.begin());
    }
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

double worst_difference(const std::vector<double>& a, const std::vector<double>& b) {
  EXPECT_EQ(a.size(), b.size());
  double worst = 0;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) worst = std::max(worst, std::abs(a[i] - b[i]));
  return worst;
}

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

TEST(DataParallel, TwentyStepsEqualOneRank) {
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
    for (const int ranks : {2, 4}) {
      const std::string many = out / (std::string(row.precision) + "-" + std::to_string(ranks));
      const ProgramResult together =
          run_program(on_ranks(ranks, small_batches(many, more)), where, 100, kMpiEnvironment);
      ASSERT_EQ(together.exit_code, 0) << together.out;
      const auto [loss, norm] = compare_logs(one, many, 20);
      EXPECT_LE(loss, row.loss) << row.precision << ", " << ranks << " ranks";
      EXPECT_LE(norm, row.norm) << row.precision << ", " << ranks << " ranks";
      EXPECT_LE(worst_difference(masters(one), masters(many)), row.weights)
          << row.precision << ", " << ranks << " ranks";
      EXPECT_NEAR(metrics(one, "summary").back().at("eval_loss").get<double>(),
                  metrics(many, "summary").back().at("eval_loss").get<double>(), row.loss * 10);
    }
    // Negative control: another seed is far outside every tolerance.
    std::vector<std::string> other_seed = more;
    other_seed.emplace_back("run.seed=1");
    const std::string other = out / (std::string(row.precision) + "-seed1");
    ASSERT_EQ(run_program(small_batches(other, other_seed), where).exit_code, 0);
    EXPECT_GT(compare_logs(one, other, 20).first, 100 * row.loss);
  }
}

TEST(DataParallel, SameLayoutTwiceIsBitEqualAndRanksMayChangeOnResume) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  const std::vector<std::string> more = {"train.budget=12steps", "train.precision=fp64"};
  const auto run = [&](int ranks, std::vector<std::string> argv, const std::string& extra = "") {
    if (!extra.empty()) argv.push_back(extra);
    const ProgramResult result = run_program(ranks == 1 ? argv : on_ranks(ranks, argv), where, 100, kMpiEnvironment);
    EXPECT_EQ(result.exit_code, 0) << result.out;
  };
  run(2, small_batches(out / "a", more));
  run(2, small_batches(out / "b", more));
  EXPECT_EQ(loss_log(out / "a"), loss_log(out / "b"));
  EXPECT_EQ(masters(out / "a"), masters(out / "b"));
  // The position is one number for all ranks, so 2, 4 and 1 ranks read on where the others stopped.
  run(2, small_batches(out / "c", more), "run.stop_after=4steps");
  run(4, small_batches(out / "c", more), "run.stop_after=8steps");
  run(1, small_batches(out / "c", more));
  EXPECT_LE(compare_logs(out / "a", out / "c", 12).first, 1e-12);
  EXPECT_LE(worst_difference(masters(out / "a"), masters(out / "c")), 1e-9);
}

TEST(DataParallel, IllegalBatchesAreRefusedWithTheNumbers) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  const ProgramResult result =
      run_program(on_ranks(3, small_batches(out / "r", {"train.budget=2steps"})), where, 60, kMpiEnvironment);
  EXPECT_EQ(result.exit_code, 2) << result.out;
  EXPECT_NE(result.out.find("3 data ranks"), std::string::npos) << result.out;
  EXPECT_FALSE(std::filesystem::exists(out / "r"));
}

TEST(DataParallel, ASignalToOneRankSavesOnAll) {
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

TEST(DataParallel, ARankThatFailsEndsTheJob) {
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
