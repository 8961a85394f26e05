// Several ranks train the same run as one: same losses, same weights, same samples.
#include <gtest/gtest.h>
#include <torch/types.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <thread>

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
      tiny_train(output, {"train.batch_quantum=64", "train.micro_batch_size=8", "model.heads=4", "model.layers=4"});
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
  std::vector<std::string> options;
};
const LayoutCase kDp2{"dp2", 2, {}};
const LayoutCase kDp4Zero{"dp4-zero", 4, {"parallel.zero=1"}};
const LayoutCase kTp2{"tp2-sp", 2, {"parallel.tensor=2", "parallel.sequence_parallel=true"}};
const LayoutCase kDp2Tp2{"dp2tp2-zero", 4, {"parallel.tensor=2", "parallel.zero=1"}};
const LayoutCase kPp2{"pp2", 2, {"parallel.pipeline=2", "parallel.check_sync=5", "parallel.staging=true"}};
const LayoutCase kPp2v2{"pp2v2-zero", 4, {"parallel.pipeline=2", "parallel.virtual_stages=2", "parallel.zero=1"}};
const LayoutCase kTp2Pp4{"tp2pp4", 8, {"parallel.tensor=2", "parallel.pipeline=4", "parallel.check_calls=true"}};
const LayoutCase kAll{"dp2tp2pp2-zero-sp",
                      8,
                      {"parallel.tensor=2", "parallel.pipeline=2", "parallel.zero=1", "parallel.sequence_parallel=true",
                       "model.recompute=layer"}};
const LayoutCase kLayouts[] = {kDp2, kDp4Zero, kTp2, kDp2Tp2, kPp2, kPp2v2, kTp2Pp4, kAll};

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
      argv.insert(argv.end(), layout.options.begin(), layout.options.end());
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
    std::vector<std::string> argv = small_batches(out / name, {"train.budget=12steps", "train.precision=fp64"});
    argv.insert(argv.end(), layout.options.begin(), layout.options.end());
    if (!extra.empty()) argv.push_back(extra);
    const ProgramResult result =
        run_program(layout.ranks == 1 ? argv : on_ranks(layout.ranks, argv), where, 100, kMpiEnvironment);
    EXPECT_EQ(result.exit_code, 0) << result.out;
  };
  const LayoutCase one{"1", 1, {}};
  run(kDp2Tp2, "fp64-a");
  run(kDp2Tp2, "fp64-b");
  EXPECT_EQ(loss_log(out / "fp64-a"), loss_log(out / "fp64-b"));
  EXPECT_EQ(worst_difference(masters(out / "fp64-a"), masters(out / "fp64-b")), 0);
  // Each rank wrote what it owns; the position is one number for all ranks, so another layout reads on.
  for (const char* file : {"rank-00000.h5", "rank-00003.h5"}) {
    EXPECT_TRUE(std::filesystem::exists(std::filesystem::path(out / "fp64-a/checkpoints/step-000000012") / file));
  }
  run(kDp2Tp2, "fp64-c", "run.stop_after=3steps");
  run(one, "fp64-c", "run.stop_after=5steps");
  run(kPp2v2, "fp64-c", "run.stop_after=7steps");
  run(kAll, "fp64-c", "run.stop_after=9steps");
  run(kDp2, "fp64-c");
  EXPECT_LE(compare_logs(out / "fp64-a", out / "fp64-c", 12).first, 1e-12);
  EXPECT_LE(worst_difference(masters(out / "fp64-a"), masters(out / "fp64-c")), 1e-9);
}

// 12 = 7 + new processes + 5 in the same layout, to the last bit.
TEST(Layouts, ResumeIsExactInEveryLayout) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  for (const LayoutCase& layout : {kDp4Zero, kPp2v2, kAll}) {
    const auto run = [&](const std::string& name, const std::string& extra) {
      std::vector<std::string> argv = small_batches(out / name, {"train.budget=12steps", "train.precision=bf16"});
      argv.insert(argv.end(), layout.options.begin(), layout.options.end());
      if (!extra.empty()) argv.push_back(extra);
      const ProgramResult result = run_program(on_ranks(layout.ranks, argv), where, 100, kMpiEnvironment);
      ASSERT_EQ(result.exit_code, 0) << result.out;
    };
    const std::string whole = std::string(layout.name) + "-whole", parts = std::string(layout.name) + "-parts";
    run(whole, "");
    run(parts, "run.stop_after=7steps");
    run(parts, "");
    EXPECT_EQ(loss_log(out / whole), loss_log(out / parts)) << layout.name;
    EXPECT_EQ(worst_difference(masters(out / whole), masters(out / parts)), 0) << layout.name;
  }
}

// Uneven splits, and what a plan without ranks says about them.
TEST(Layouts, LayersThatDoNotDivideAreSplitUnevenly) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  const std::vector<std::string> argv =
      small_batches(out / "r", {"train.budget=2steps", "model.layers=5", "parallel.pipeline=2"});
  const ProgramResult result = run_program(on_ranks(2, argv), where, 60, kMpiEnvironment);
  ASSERT_EQ(result.exit_code, 0) << result.out;
  // The whole model is in the checkpoint: all five layers, every parameter once.
  ModelConfig model;
  model.layers = 5;
  model.hidden = 64;
  model.heads = 4;
  model.ffn = 128;
  model.vocab_size = 500;
  model.seq_length = 32;
  EXPECT_EQ(masters(out / "r").numel(), parameter_count(model));
  const auto plan = [&](std::vector<std::string> more) {
    std::vector<std::string> dry = small_batches(out / "dry", std::move(more));
    dry.emplace_back("--dry-run");
    return run_program(dry, where, 30);
  };
  const ProgramResult thirty = plan({"model.layers=30", "parallel.pipeline=4", "--ranks", "4"});
  EXPECT_EQ(thirty.exit_code, 0) << thirty.out;
  for (const char* part :
       {"stage 0: embedding, layers 0-7:", "stage 1: layers 8-15:", "stage 2: layers 16-22:",
        "stage 3: layers 23-29, head:", "pipeline {0 1 2 3}", "bubble 18.8 %", "nothing was allocated"}) {
    EXPECT_NE(thirty.out.find(part), std::string::npos) << part << "\n" << thirty.out;
  }
  const ProgramResult large = plan({"model.hidden=20480", "model.heads=128", "model.ffn=81920", "model.layers=105",
                                    "parallel.tensor=8", "parallel.pipeline=35", "--ranks", "560"});
  EXPECT_EQ(large.exit_code, 0) << large.out;  // half a trillion parameters fit nowhere here
  EXPECT_LT(large.seconds, 20);
  EXPECT_FALSE(std::filesystem::exists(out / "dry"));
  EXPECT_EQ(plan({"parallel.split=3,2", "parallel.pipeline=2", "--ranks", "2"}).exit_code, 2);
  EXPECT_EQ(plan({"parallel.pipeline=8", "--ranks", "8"}).exit_code, 2);  // four layers
  EXPECT_EQ(plan({"parallel.virtual_stages=2"}).exit_code, 2);
  EXPECT_EQ(plan({"parallel.sequence_parallel=true"}).exit_code, 2);
  EXPECT_EQ(plan({"parallel.timeout=0s"}).exit_code, 2);
  const ProgramResult five = plan({"train.micro_batch_size=1", "--ranks", "5"});
  EXPECT_NE(five.out.find("no micro-batch fits, take another number of data ranks or train.batch_quantum=60 or 65"),
            std::string::npos)
      << five.out;
  EXPECT_EQ(run_program({"cram_train", "--ranks", "2"}, where, 30).exit_code, 2);
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
  argv.back() = "parallel.tensor=8";
  argv.emplace_back("model.heads=12");
  argv.emplace_back("model.hidden=96");
  const ProgramResult eight = run_program(on_ranks(8, argv), where, 60, kMpiEnvironment);
  EXPECT_EQ(eight.exit_code, 2) << eight.out;
  EXPECT_NE(eight.out.find("legal sizes: 1, 2, 4"), std::string::npos) << eight.out;
  EXPECT_FALSE(std::filesystem::exists(out / "r"));
}

TEST(Layouts, IllegalBatchesAreRefusedWithTheNumbers) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  const ProgramResult result =
      run_program(on_ranks(3, small_batches(out / "r", {"train.budget=2steps"})), where, 60, kMpiEnvironment);
  EXPECT_EQ(result.exit_code, 2) << result.out;
  EXPECT_NE(result.out.find("3 data ranks"), std::string::npos) << result.out;
  // Interleaved: one group of micro-batches a stage.
  const ProgramResult interleaved =
      run_program(on_ranks(2, small_batches(out / "r", {"train.budget=2steps", "parallel.pipeline=2",
                                                        "parallel.virtual_stages=2", "train.micro_batch_size=64"})),
                  where, 60, kMpiEnvironment);
  EXPECT_EQ(interleaved.exit_code, 2) << interleaved.out;
  EXPECT_NE(interleaved.out.find("2 stages (interleaved); nearest legal micro-batch: 32"), std::string::npos)
      << interleaved.out;
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

// A step far longer than anybody waits for: ranks ask each other on the way through it.
TEST(Layouts, ASignalEndsALongStepSoon) {
  const std::string where = tiny_corpus();
  for (const char* layout : {"parallel.zero=1", "parallel.pipeline=2"}) {
    const TemporaryFolder out;
    const std::vector<std::string> argv = small_batches(
        out / "r", {layout, "train.batch_size=262144", "train.batch_ramp=0", "train.budget=3steps", "eval.rows=8"});
    RunningProgram program(on_ranks(2, argv), where, kMpiEnvironment);
    ASSERT_TRUE(program.wait_for_output("layout ")) << program.output_so_far();
    std::this_thread::sleep_for(std::chrono::seconds(4));  // into the first step, which takes minutes
    const auto from = std::chrono::steady_clock::now();
    program.send(SIGUSR1);
    const ProgramResult result = program.wait(60);
    const double waited_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - from).count();
    EXPECT_EQ(result.exit_code, 75) << layout << ": " << result.out;
    EXPECT_LT(waited_s, 30) << layout;
    EXPECT_NE(result.out.find("saving step 0"), std::string::npos) << result.out;
  }
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

class Failures : public testing::Test {
 protected:
  // Starts four ranks, two stages, and waits for some steps.
  void start(std::vector<std::string> more) {
    more.insert(more.end(), {"train.budget=100000steps", "log.every=1steps", "parallel.pipeline=2"});
    program_.emplace(on_ranks(4, small_batches(out_ / "r", more)), tiny_corpus(), kMpiEnvironment);
    ASSERT_TRUE(program_->wait_for_output("| step ")) << program_->output_so_far();
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // whatever step a resumed run is at
  }
  // Signals the rank started last, by the folder's name in its command line (process numbers may have wrapped around).
  void signal_one(const std::string& signal) {
    const ProgramResult sent = run_program(
        {"/bin/sh", "-c", "kill -" + signal + " $(pgrep -nf 'bin/[c]ram_train.*" + (out_ / "r") + "')"}, tiny_corpus());
    ASSERT_EQ(sent.exit_code, 0) << sent.out;
  }
  // Two ranks of one job, the second with an option that the first has not.
  ProgramResult run_with_another_second_rank(const std::string& option) {
    std::vector<std::string> argv = on_ranks(1, small_batches(out_ / "r", {"train.budget=10steps"}));
    argv.emplace_back(":");
    argv.insert(argv.end(), {"-np", "1"});
    const std::vector<std::string> other = small_batches(out_ / "r", {"train.budget=10steps", option});
    argv.push_back(std::string(CRAM_PROGRAM_DIR) + "/cram_train");
    argv.insert(argv.end(), other.begin() + 1, other.end());
    return run_program(argv, tiny_corpus(), 30, kMpiEnvironment);
  }
  void expect_nothing_left() {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    const ProgramResult left =
        run_program({"/bin/sh", "-c", "pgrep -fa '[c]ram_train.*" + (out_ / "r") + "'"}, tiny_corpus());
    EXPECT_NE(left.exit_code, 0) << "still running: " << left.out;
  }
  TemporaryFolder out_;
  std::optional<RunningProgram> program_;
};

TEST_F(Failures, ADeadRankEndsTheJobAndTheSameCommandResumes) {
  for (const char* signal : {"KILL", "SEGV"}) {
    start({"checkpoint.every=2steps"});
    signal_one(signal);
    const ProgramResult result = program_->wait(10);
    EXPECT_NE(result.exit_code, 0) << result.out;
    EXPECT_NE(result.exit_code, -1) << "the job went on";
    EXPECT_NE(result.out.find("while this rank waits: step "), std::string::npos) << result.out;
    EXPECT_NE(result.out.find(" of group "), std::string::npos) << result.out;
    expect_nothing_left();
  }
  std::vector<std::string> argv = small_batches(out_ / "r", {"train.budget=100000steps", "parallel.pipeline=2",
                                                             "checkpoint.every=2steps", "run.stop_after=40steps"});
  const ProgramResult again = run_program(on_ranks(4, argv), tiny_corpus(), 60, kMpiEnvironment);
  EXPECT_EQ(again.exit_code, 0) << again.out;
  EXPECT_NE(again.out.find("resuming after step "), std::string::npos) << again.out;
}

TEST_F(Failures, AHangingRankIsNamedAndEndsTheJobInTime) {
  start({"parallel.timeout=3s"});
  signal_one("STOP");
  const ProgramResult result = program_->wait(20);
  EXPECT_EQ(result.exit_code, 30) << result.out;
  EXPECT_NE(result.out.find("no answer for 3 s: step "), std::string::npos) << result.out;
  EXPECT_NE(result.out.find(", training: "), std::string::npos) << result.out;
  EXPECT_NE(result.out.find("every rank but 3 has reported being stuck"), std::string::npos) << result.out;
  expect_nothing_left();
}

// Wherever it was: before, in or after MPI_Init.
TEST_F(Failures, ARankThatHangsWhileStartingEndsTheJobInTime) {
  const std::vector<std::string> argv =
      small_batches(out_ / "r", {"train.budget=100000steps", "parallel.timeout=2s", "parallel.init_timeout=3s"});
  program_.emplace(on_ranks(2, argv), tiny_corpus(), kMpiEnvironment);
  const ProgramResult stopped =
      run_program({"/bin/sh", "-c",
                   "for i in $(seq 200); do p=$(pgrep -nf 'bin/[c]ram_train.*" + (out_ / "r") +
                       "'); [ -n \"$p\" ] && [ \"$(cat /proc/$p/comm)\" = cram_train ] && kill -STOP $p && exit 0; "
                       "sleep 0.02; done; exit 1"},
                  tiny_corpus());
  ASSERT_EQ(stopped.exit_code, 0) << stopped.out;
  const ProgramResult result = program_->wait(25);
  EXPECT_EQ(result.exit_code, 30) << result.out;
  EXPECT_NE(result.out.find("no answer for "), std::string::npos) << result.out;
  expect_nothing_left();
}

// Stopped for longer than the timeout, all of it: when the job goes on, nobody has waited.
TEST_F(Failures, ASuspendedJobGoesOn) {
  start({"parallel.timeout=2s"});
  const auto all = [&](const char* signal) {
    return run_program({"/bin/sh", "-c",
                        std::string("kill -") + signal + " $(pgrep -f 'bin/[c]ram_train.*" + (out_ / "r") + "')"},
                       tiny_corpus())
        .exit_code;
  };
  ASSERT_EQ(all("STOP"), 0);
  std::this_thread::sleep_for(std::chrono::seconds(4));
  ASSERT_EQ(all("CONT"), 0);
  std::this_thread::sleep_for(std::chrono::seconds(3));
  program_->send(SIGUSR1);
  const ProgramResult result = program_->wait(30);
  EXPECT_EQ(result.exit_code, 75) << result.out;
}

// One rank with another data folder: it fails alone, before the others could know.
TEST_F(Failures, ARankThatThrowsEndsTheJobWithItsCode) {
  const ProgramResult result = run_with_another_second_rank("data.shards=nowhere");
  EXPECT_EQ(result.exit_code, 22) << result.out;
  EXPECT_NE(result.out.find("nowhere"), std::string::npos) << result.out;
}

TEST_F(Failures, RanksThatWereNotStartedAlikeAreRefused) {
  const ProgramResult result = run_with_another_second_rank("train.lr=1e-4");
  EXPECT_EQ(result.exit_code, 2) << result.out;
  const std::size_t said = result.out.find("train.lr: rank 1 has 1e-04, rank 0 0.002");
  EXPECT_NE(said, std::string::npos) << result.out;
  EXPECT_EQ(result.out.find("train.lr: rank 1 has", said + 1), std::string::npos) << "said twice: " << result.out;
  EXPECT_FALSE(std::filesystem::exists(out_ / "r"));
}

}  // namespace
}  // namespace cram::test
