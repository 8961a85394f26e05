// The launch scripts with fake launchers: what they start, how signals and exit codes pass through, when Slurm
// requeues.
#include <gtest/gtest.h>
#include <pty.h>

#include "launch/fakes.h"

namespace cram::test {
namespace {

const std::string kSource = CRAM_SOURCE_DIR;

// slurm.sbatch as Slurm runs it: a copy in a spool folder, in the folder of the sbatch call, with a job's variables.
class Slurm : public ::testing::Test {
 protected:
  Slurm() {
    std::filesystem::create_directories(spool_ / "job00042");
    std::filesystem::copy_file(kSource + "/launch/slurm.sbatch", script());
  }
  [[nodiscard]] std::string script() const { return spool_ / "job00042/slurm_script"; }

  // No variable of a job that the tests themselves may run in.
  [[nodiscard]] std::vector<std::string> command() const {
    std::vector<std::string> argv = {"/usr/bin/env"};
    for (const char* name : {"SLURM_RESTART_COUNT", "SLURM_CPUS_PER_TASK", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE",
                             "CRAM_HOME", "CRAM_LAUNCHER", "CRAM_SRUN_ARGS", "CRAM_MPIRUN_ARGS", "CRAM_MAX_RESTARTS"}) {
      argv.insert(argv.end(), {"-u", name});
    }
    return argv;
  }
  // `variables` are NAME=value; `arguments` go to cram_train.
  [[nodiscard]] std::vector<std::string> job(const std::vector<std::string>& variables,
                                             const std::vector<std::string>& arguments = {}) const {
    std::vector<std::string> argv = command();
    argv.insert(argv.end(), {"SLURM_JOB_ID=42", "SLURM_SUBMIT_DIR=" + kSource});
    argv.insert(argv.end(), variables.begin(), variables.end());
    argv.insert(argv.end(), {"bash", script()});
    argv.insert(argv.end(), arguments.begin(), arguments.end());
    return argv;
  }
  [[nodiscard]] ProgramResult run(const std::vector<std::string>& variables,
                                  const std::vector<std::string>& arguments = {}) const {
    return run_program(job(variables, arguments), spool_.path().string(), 30, fakes_.environment({}));
  }

  Fakes fakes_;
  TemporaryFolder spool_;
};

TEST_F(Slurm, OnlyExitCode75IsRequeuedAndOnlyOnce) {
  for (const char* launcher : {"srun", "mpirun"}) {
    for (const int code : {0, 1, 2, 30, 75, 137, 138}) {
      fakes_.clear();
      const ProgramResult result = run({std::string("CRAM_LAUNCHER=") + launcher, "FAKE_EXIT=" + std::to_string(code)});
      EXPECT_EQ(result.exit_code, code) << result.out;
      EXPECT_EQ(fakes_.count(std::string(launcher) + " ["), 1) << fakes_.log();
      EXPECT_EQ(fakes_.count("scontrol"), code == 75 ? 1 : 0) << launcher << " " << code << ": " << fakes_.log();
      EXPECT_EQ(fakes_.count("scontrol requeue 42\n"), code == 75 ? 1 : 0) << fakes_.log();
    }
  }
}

TEST_F(Slurm, SignalsReachTheLauncherAsUsr1) {
  for (const char* launcher : {"srun", "mpirun"}) {
    for (const int signal_number : {SIGUSR1, SIGTERM}) {
      fakes_.clear();
      RunningProgram program(job({std::string("CRAM_LAUNCHER=") + launcher, "FAKE_WAIT=1", "FAKE_EXIT=75"}),
                             spool_.path().string(), fakes_.environment({}));
      ASSERT_TRUE(program.wait_for_output("ready", 20)) << program.output_so_far();
      program.send(signal_number);
      const ProgramResult result = program.wait(20);
      EXPECT_EQ(result.exit_code, 75) << result.out;
      EXPECT_EQ(fakes_.count("got USR1"), 1) << fakes_.log();
      EXPECT_EQ(fakes_.count("got "), 1) << fakes_.log();
      EXPECT_EQ(fakes_.count("scontrol requeue 42"), 1) << fakes_.log();
    }
  }
}

// The launcher's own end counts, not the signal: an error while saving is an error.
TEST_F(Slurm, AFailureAfterTheSignalIsHandedOn) {
  RunningProgram program(job({"FAKE_WAIT=1", "FAKE_EXIT=21"}), spool_.path().string(), fakes_.environment({}));
  ASSERT_TRUE(program.wait_for_output("ready", 20)) << program.output_so_far();
  program.send(SIGUSR1);
  EXPECT_EQ(program.wait(20).exit_code, 21);
  EXPECT_EQ(fakes_.count("scontrol"), 0) << fakes_.log();
}

// Slurm sends TERM when the time is up, and cram_train takes a second signal as an order to leave without saving.
TEST_F(Slurm, OnlyTheFirstSignalIsPassedOn) {
  write_script(fakes_.path("srun"), R"(
trap 'echo got USR1 >>"$FAKE_LOG"; echo first' USR1
echo ready
for _ in {1..1500}; do [ -e "$FAKE_LOG.end" ] && break; sleep 0.02; done
exit 75
)");
  RunningProgram program(job({}), spool_.path().string(), fakes_.environment({}));
  ASSERT_TRUE(program.wait_for_output("ready", 20)) << program.output_so_far();
  program.send(SIGUSR1);
  ASSERT_TRUE(program.wait_for_output("first", 20)) << program.output_so_far();
  program.send(SIGTERM);
  program.send(SIGUSR1);
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  std::ofstream(fakes_.path("log.txt.end")) << "";
  EXPECT_EQ(program.wait(20).exit_code, 75);
  EXPECT_EQ(fakes_.count("got USR1"), 1) << fakes_.log();
}

// scancel sends TERM to every rank itself; ours would be the second. A cancelled job must not come back, one whose time
// ran out must.
TEST_F(Slurm, ACancelledJobSavesAndStaysDown) {
  write_script(fakes_.path("srun"), R"(
trap 'echo got USR1 >>"$FAKE_LOG"' USR1
echo ready
for _ in {1..1500}; do [ -e "$FAKE_LOG.end" ] && break; sleep 0.02; done
exit 75
)");
  struct Case {
    const char* state;
    int signal_number, passed_on, requeues;
  };
  for (const Case& c :
       {Case{"COMPLETING Reason=None", SIGTERM, 0, 0}, Case{"COMPLETING Reason=TimeLimit", SIGTERM, 0, 1},
        Case{"RUNNING Reason=None", SIGTERM, 1, 1}, Case{"COMPLETING Reason=None", SIGUSR1, 1, 1}}) {
    fakes_.clear();
    std::filesystem::remove(fakes_.path("log.txt.end"));
    RunningProgram program(job({std::string("FAKE_STATE=") + c.state}), spool_.path().string(), fakes_.environment({}));
    ASSERT_TRUE(program.wait_for_output("ready", 20)) << program.output_so_far();
    program.send(c.signal_number);
    for (int i = 0; i < 500 && fakes_.count("got USR1") < c.passed_on; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // for one that must not come
    std::ofstream(fakes_.path("log.txt.end")) << "";
    EXPECT_EQ(program.wait(20).exit_code, 75);
    EXPECT_EQ(fakes_.count("got USR1"), c.passed_on) << c.state << "\n" << fakes_.log();
    EXPECT_EQ(fakes_.count("scontrol requeue 42"), c.requeues) << c.state << "\n" << fakes_.log();
  }
}

TEST_F(Slurm, RestartsAreLimited) {
  const auto requeues = [&](const std::vector<std::string>& variables) {
    fakes_.clear();
    std::vector<std::string> all = {"FAKE_EXIT=75"};
    all.insert(all.end(), variables.begin(), variables.end());
    const ProgramResult result = run(all);
    EXPECT_EQ(result.exit_code, 75) << result.out;
    return fakes_.count("scontrol requeue");
  };
  EXPECT_EQ(requeues({}), 1);  // SLURM_RESTART_COUNT is not set in a first run
  EXPECT_EQ(requeues({"SLURM_RESTART_COUNT=99"}), 1);
  EXPECT_EQ(requeues({"SLURM_RESTART_COUNT=100"}), 0);
  EXPECT_EQ(requeues({"SLURM_RESTART_COUNT=2", "CRAM_MAX_RESTARTS=3"}), 1);
  EXPECT_EQ(requeues({"SLURM_RESTART_COUNT=3", "CRAM_MAX_RESTARTS=3"}), 0);
  EXPECT_EQ(requeues({"CRAM_MAX_RESTARTS=0"}), 0);
  const ProgramResult said = run({"FAKE_EXIT=75", "SLURM_RESTART_COUNT=3", "CRAM_MAX_RESTARTS=3"});
  EXPECT_NE(said.out.find("not requeued"), std::string::npos) << said.out;
}

TEST_F(Slurm, ARequeueThatFailsIsSaid) {
  const ProgramResult result = run({"FAKE_EXIT=75", "FAKE_SCONTROL_EXIT=1"});
  EXPECT_EQ(result.exit_code, 75) << result.out;
  EXPECT_NE(result.out.find("scontrol requeue 42 failed"), std::string::npos) << result.out;
  EXPECT_EQ(fakes_.count("scontrol requeue"), 1) << fakes_.log();
  EXPECT_EQ(run({"FAKE_EXIT=75"}).out.find("failed"), std::string::npos);
}

TEST_F(Slurm, RanksKnowWhoTheyAreAndGetTheArguments) {
  const std::vector<std::string> arguments = {"train.budget=5steps", "run.output=with space"};
  const ProgramResult result = run({"FAKE_RUN=1", "SLURM_NTASKS=2", "SLURM_CPUS_PER_TASK=3"}, arguments);
  EXPECT_EQ(result.exit_code, 0) << result.out;
  for (const char* line : {"rank 0 of 2: run.threads=3 train.budget=5steps run.output=with space\n",
                           "rank 1 of 2: run.threads=3 train.budget=5steps run.output=with space\n"}) {
    EXPECT_NE(result.out.find(line), std::string::npos) << result.out;
  }
  EXPECT_EQ(fakes_.count("srun [--mpi=pmix] "), 1) << fakes_.log();
  EXPECT_EQ(fakes_.count("[run.output=with space]"), 1) << fakes_.log();
  EXPECT_EQ(run({"CRAM_SRUN_ARGS=--mpi=pmi2 --label"}).exit_code, 0);
  EXPECT_EQ(fakes_.count("srun [--mpi=pmi2] [--label] [" + fakes_.path("cram_train") + "]"), 1) << fakes_.log();
  EXPECT_EQ(run({"CRAM_LAUNCHER=mpirun", "SLURM_NTASKS=4"}, arguments).exit_code, 0);
  EXPECT_EQ(
      fakes_.count("[-n] [4] [" + fakes_.path("cram_train") + "] [train.budget=5steps] [run.output=with space]\n"), 1)
      << fakes_.log();
}

TEST_F(Slurm, MistakesAreRefusedBeforeAnythingStarts) {
  const auto refused = [&](const std::vector<std::string>& variables, const std::string& message) {
    const ProgramResult result = run(variables);
    EXPECT_EQ(result.exit_code, 2) << result.out;
    EXPECT_NE(result.out.find(message), std::string::npos) << result.out;
  };
  const std::string elsewhere = spool_.path().string();
  refused({"SLURM_SUBMIT_DIR=" + elsewhere}, "got \"" + elsewhere + "\", which has no launch/common.sh");
  refused({"CRAM_HOME=/nowhere"}, "got \"/nowhere\"");
  refused({"CRAM_LAUNCHER=ssh"}, "expected srun or mpirun in CRAM_LAUNCHER, got \"ssh\"");
  refused({"CRAM_MAX_RESTARTS=many"}, "CRAM_MAX_RESTARTS, got \"many\"");
  refused({"CRAM_TRAIN=/nowhere/cram_train"}, "CRAM_TRAIN, got /nowhere/cram_train");
  std::vector<std::string> no_job = command();
  no_job.insert(no_job.end(), {"-u", "SLURM_SUBMIT_DIR", "bash", script()});
  EXPECT_EQ(run_program(no_job, elsewhere, 30, fakes_.environment({})).exit_code, 2);
  EXPECT_EQ(fakes_.log(), "");
  // CRAM_HOME is enough where the job was submitted from another folder.
  EXPECT_EQ(run({"SLURM_SUBMIT_DIR=" + elsewhere, "CRAM_HOME=" + kSource}).exit_code, 0);
  EXPECT_EQ(fakes_.count("srun ["), 1) << fakes_.log();
}

TEST(MultiNode, MistakesAreRefusedWithTheNextMove) {
  const Fakes fakes;
  const TemporaryFolder folder;
  std::ofstream(folder / "hosts") << "# two hosts\nnode1 slots=2\n\nnode2 slots = 1 # small\n";
  std::ofstream(folder / "empty") << "# none\n";
  std::ofstream(folder / "open") << "node1\nnode2 slots=1\n";
  const auto launch = [&](std::vector<std::string> argv, const Fakes::Environment& more = {}) {
    argv.insert(argv.begin(), kSource + "/launch/multi_node.sh");
    return run_program(argv, folder.path().string(), 30, fakes.environment(more));
  };
  const auto refused = [&](const std::vector<std::string>& argv, const std::string& message,
                           const Fakes::Environment& more = {}) {
    const ProgramResult result = launch(argv, more);
    EXPECT_EQ(result.exit_code, 2) << result.out;
    EXPECT_NE(result.out.find(message), std::string::npos) << result.out;
  };
  refused({}, "got 0 arguments");
  refused({"hosts"}, "got 1 arguments");
  refused({"missing", "2"}, "got missing, which cannot be read");
  refused({"empty", "2"}, "at least one host in empty");
  refused({"hosts", "0"}, "got \"0\"");
  refused({"hosts", "two"}, "got \"two\"");
  refused({"hosts", "4"}, "expected at most 3 ranks");
  refused({"hosts", "2"}, "CRAM_TRAIN, got /nowhere", {{"CRAM_TRAIN", "/nowhere"}});
  refused({"hosts", "2"}, "got \"HYDRA build details:\"", {{"FAKE_VERSION", "HYDRA build details:"}});
  EXPECT_EQ(fakes.log(), "");
  EXPECT_EQ(launch({"hosts", "3"}).exit_code, 0);
  EXPECT_EQ(launch({"open", "30"}).exit_code, 0);  // node1 has as many slots as cores
  EXPECT_EQ(fakes.count("mpirun ["), 2);
}

TEST(MultiNode, NamesOfParametersFollowTheVersion) {
  const Fakes fakes;
  const TemporaryFolder folder;
  std::ofstream(folder / "hosts") << "node1 slots=2\n";
  const auto called = [&](const Fakes::Environment& more) {
    fakes.clear();
    const ProgramResult result = run_program({kSource + "/launch/multi_node.sh", "hosts", "2", "run.output=with space"},
                                             folder.path().string(), 30, fakes.environment(more));
    EXPECT_EQ(result.exit_code, 7) << result.out;
    return fakes.log();
  };
  const Fakes::Environment more = {
      {"FAKE_EXIT", "7"}, {"CRAM_NETWORK", "eth0"}, {"CRAM_RSH_AGENT", "my-ssh"}, {"LD_LIBRARY_PATH", "/some/lib"}};
  const auto has = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  };
  const auto lacks = [](const std::string& text, const std::string& part) {
    EXPECT_EQ(text.find(part), std::string::npos) << part << "\n" << text;
  };
  const std::string four = called(more);
  has(four, "[--hostfile] [hosts]");
  has(four, "[--wdir] [" + folder.path().string() + "]");
  has(four, "[--mca] [btl_tcp_if_include] [eth0] [--mca] [oob_tcp_if_include] [eth0]");
  has(four, "[--mca] [plm_rsh_agent] [my-ssh]");
  for (const char* name : {"OMP_NUM_THREADS", "PATH", "LD_LIBRARY_PATH", "CRAM_NETWORK"}) {
    has(four, std::string("[-x] [") + name + "]");
  }
  has(four, "[-n] [2] [" + fakes.path("cram_train") + "] [run.output=with space]\n");
  lacks(four, "prte");
  Fakes::Environment newer = more;
  newer.emplace_back("FAKE_VERSION", "mpirun (Open MPI) 5.0.7");
  const std::string five = called(newer);
  has(five, "[--mca] [btl_tcp_if_include] [eth0] [--prtemca] [prte_if_include] [eth0]");
  has(five, "[--prtemca] [plm_ssh_agent] [my-ssh]");
  lacks(five, "plm_rsh_agent");
  lacks(five, "oob_tcp_if_include");
  const std::string plain = called({{"FAKE_EXIT", "7"}});
  lacks(plain, "if_include");
  lacks(plain, "agent");
}

TEST(MultiNode, SignalsReachTheLauncherAsUsr1) {
  const Fakes fakes;
  const TemporaryFolder folder;
  std::ofstream(folder / "hosts") << "node1 slots=2\n";
  for (const int signal_number : {SIGTERM, SIGINT, SIGHUP, SIGUSR1}) {
    fakes.clear();
    RunningProgram program({kSource + "/launch/multi_node.sh", "hosts", "2"}, folder.path().string(),
                           fakes.environment({{"FAKE_WAIT", "1"}, {"FAKE_EXIT", "75"}}));
    ASSERT_TRUE(program.wait_for_output("ready", 20)) << program.output_so_far();
    program.send(signal_number);
    EXPECT_EQ(program.wait(20).exit_code, 75);
    EXPECT_EQ(fakes.count("got USR1"), 1) << fakes.log();
    EXPECT_EQ(fakes.count("got "), 1) << fakes.log();
  }
}

// With the real mpirun and a rank that answers USR1 as cram_train does. A terminal sends its interrupt to every process
// of the foreground, and mpirun would kill its ranks for it.
TEST(LocalRanks, AnInterruptOfTheTerminalLetsRanksSave) {
  const Fakes fakes;
  write_script(fakes.path("rank"), R"(
trap 'echo saving; sleep 1.5; echo saved; exit 75' USR1
echo ready
for _ in {1..600}; do sleep 0.05; done
)");
  int terminal = -1;
  const pid_t pid = ::forkpty(&terminal, nullptr, nullptr, nullptr);
  ASSERT_GE(pid, 0);
  if (pid == 0) {
    ::setenv("CRAM_TRAIN", fakes.path("rank").c_str(), 1);
    const std::string script = kSource + "/launch/run_local.sh";
    ::execl(script.c_str(), script.c_str(), "2", nullptr);
    ::_exit(127);
  }
  std::string out;
  bool interrupted = false;
  char bytes[512];
  for (ssize_t n = 0; (n = ::read(terminal, bytes, sizeof bytes)) > 0;) {
    out.append(bytes, static_cast<std::size_t>(n));
    const std::size_t first = out.find("ready");
    if (!interrupted && first != std::string::npos && out.find("ready", first + 1) != std::string::npos) {
      interrupted = ::write(terminal, "\x03", 1) == 1;
    }
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  ::close(terminal);
  EXPECT_TRUE(interrupted);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 75) << out;
  EXPECT_NE(out.find("saved"), std::string::npos) << out;
}

// A signal that comes before the ranks catch signals ends them; the same command goes on, so that is 75, too.
TEST(LocalRanks, ASignalDuringTheStartIsAnswered) {
  const Fakes fakes;
  write_script(fakes.path("rank"), "echo ready\nfor _ in {1..600}; do sleep 0.05; done\n");
  RunningProgram program({kSource + "/launch/run_local.sh", "2"}, fakes.path("."),
                         {{"CRAM_TRAIN", fakes.path("rank")}});
  ASSERT_TRUE(program.wait_for_output("ready", 20)) << program.output_so_far();
  program.send(SIGTERM);
  const ProgramResult result = program.wait(20);
  EXPECT_EQ(result.exit_code, 75) << result.out;
  EXPECT_NE(result.out.find("while starting"), std::string::npos) << result.out;
  // Without our signal the same death is a fault.
  write_script(fakes.path("rank"), "kill -USR1 $$\n");
  EXPECT_EQ(
      run_program({kSource + "/launch/run_local.sh", "1"}, fakes.path("."), 20, {{"CRAM_TRAIN", fakes.path("rank")}})
          .exit_code,
      138);
}

}  // namespace
}  // namespace cram::test
