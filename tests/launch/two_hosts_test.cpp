// launch/multi_node.sh on two hosts: network namespaces that see each other only through a pair of virtual interfaces,
// each with its own host name. What starts a command on a host gives it a fresh environment and another folder, as ssh
// does.
#include <gtest/gtest.h>

#include <cmath>

#include "launch/fakes.h"
#include "support/tiny_corpus.h"

namespace cram::test {
namespace {

const std::string kSource = CRAM_SOURCE_DIR;

class TwoHosts : public ::testing::Test {
 protected:
  void SetUp() override {
    // Leftovers of a test program that was killed are recognised by its process number.
    const ProgramResult made = shell(R"(
for old in $(ip netns list | grep -oE '^cramhost[0-9]+[ab]'); do
  number=${old#cramhost}
  [ -d "/proc/${number%[ab]}" ] || { ip netns pids "$old" | xargs -r kill -9; ip netns del "$old"; }
done
set -e
ip netns add $A
ip netns add $B
ip link add v$A netns $A type veth peer name v$B netns $B
ip -n $A addr add 10.77.0.1/24 dev v$A
ip -n $B addr add 10.77.0.2/24 dev v$B
for host in $A $B; do
  ip -n $host link add inner type veth peer name bridge
  ip -n $host addr add 10.78.0.1/24 dev inner
  for interface in lo inner bridge v$host; do ip -n $host link set $interface up; done
done
ip netns exec $A unshare --uts hostname probe
)");
    if (made.exit_code != 0) GTEST_SKIP() << "no network namespaces here: " << made.out;
    std::ofstream(folder_ / "hosts") << "10.77.0.1 slots=2\n10.77.0.2 slots=2\n";
    std::ofstream(folder_ / "one-each") << "10.77.0.1 slots=1\n10.77.0.2 slots=1\n";
    write_script(folder_ / "agent", "host=$1; shift\ncase $host in 10.77.0.1) n=" + host('a') +
                                        " ;; 10.77.0.2) n=" + host('b') + R"( ;; *) exit 255 ;; esac
cd /
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/ ip netns exec $n unshare --uts bash -c "hostname $n; $*"
)");
    // The program, and on which host its ranks are.
    write_script(folder_ / "rank",
                 "echo \"rank $OMPI_COMM_WORLD_RANK is on $(hostname) with $OMP_NUM_THREADS thread\"\nexec " +
                     std::string(CRAM_PROGRAM_DIR) + "/cram_train \"$@\"\n");
  }
  void TearDown() override {
    shell(R"(
for host in $A $B; do ip netns pids $host | xargs -r kill -9; done
for host in $A $B; do ip netns del $host; done
)");
  }

  [[nodiscard]] static std::string host(char which) { return "cramhost" + std::to_string(::getpid()) + which; }

  // With the hosts' names as A and B.
  static ProgramResult shell(const std::string& text) {
    return run_program({"/bin/bash", "-c", "export PATH=$PATH:/usr/sbin:/sbin\n" + text}, "/", 20,
                       {{"A", host('a')}, {"B", host('b')}});
  }

  // multi_node.sh called on the first host.
  [[nodiscard]] std::vector<std::string> launch(const std::string& hostfile, int ranks,
                                                const std::vector<std::string>& arguments) const {
    std::vector<std::string> argv = {"/bin/bash",
                                     "-c",
                                     "PATH=$PATH:/usr/sbin:/sbin\nexec ip netns exec $A unshare --uts bash -c "
                                     "'hostname $A; exec \"$@\"' on-a \"$@\"",
                                     "launch",
                                     kSource + "/launch/multi_node.sh",
                                     folder_ / hostfile,
                                     std::to_string(ranks)};
    argv.insert(argv.end(), arguments.begin(), arguments.end());
    return argv;
  }
  [[nodiscard]] std::vector<std::pair<std::string, std::string>> environment(
      const std::string& network = "10.77.0.0/24") const {
    return {{"A", host('a')},
            {"B", host('b')},
            {"CRAM_RSH_AGENT", folder_ / "agent"},
            {"CRAM_NETWORK", network},
            {"CRAM_TRAIN", folder_ / "rank"},
            {"OMPI_MCA_mpi_yield_when_idle", "1"}};
  }
  [[nodiscard]] static std::vector<std::string> small_train(const std::string& output, const std::string& budget) {
    std::vector<std::string> argv =
        tiny_train(output, {"train.batch_quantum=64", "train.micro_batch_size=8", "train.precision=fp32",
                            "train.budget=" + budget, "log.every=1steps"});
    argv.erase(argv.begin());
    return argv;
  }

  static std::string processes() { return shell("for host in $A $B; do ip netns pids $host; done").out; }
  static void expect_nothing_left(double limit_s) {
    const auto start = std::chrono::steady_clock::now();
    std::string left = processes();
    while (!left.empty() && std::chrono::steady_clock::now() - start < std::chrono::duration<double>(limit_s)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      left = processes();
    }
    EXPECT_EQ(left, "") << "still running";
  }

  TemporaryFolder folder_;
};

TEST_F(TwoHosts, TrainTogether) {
  const std::string where = tiny_corpus();
  const std::string run = folder_ / "r", alone = folder_ / "alone";
  const ProgramResult result = run_program(launch("hosts", 4, small_train(run, "10steps")), where, 100, environment());
  ASSERT_EQ(result.exit_code, 0) << result.out;
  for (int rank = 0; rank < 4; ++rank) {
    const std::string line = "rank " + std::to_string(rank) + " is on " + host(rank < 2 ? 'a' : 'b') + " with 1 thread";
    EXPECT_NE(result.out.find(line), std::string::npos) << line << "\n" << result.out;
  }
  // Ten steps' gradients of more than 50,000 numbers crossed the wire: the second host did not train on its own.
  const ProgramResult received = shell("ip netns exec $B cat /sys/class/net/v$B/statistics/rx_bytes");
  ASSERT_EQ(received.exit_code, 0) << received.out;
  EXPECT_GT(std::stoll(received.out), 10 * 50'000 * 4) << received.out;
  expect_nothing_left(10);

  std::vector<std::string> argv = small_train(alone, "10steps");
  argv.insert(argv.begin(), "cram_train");
  ASSERT_EQ(run_program(argv, where).exit_code, 0);
  const auto together = metrics(run, "train"), one = metrics(alone, "train");
  ASSERT_EQ(together.size(), 10U);
  ASSERT_EQ(one.size(), 10U);
  for (std::size_t i = 0; i < one.size(); ++i) {
    const double expected = one[i].at("loss").get<double>();
    EXPECT_LE(std::abs(together[i].at("loss").get<double>() - expected), 1e-5 * expected) << "step " << i + 1;
  }
}

TEST_F(TwoHosts, TermSavesOnBothAndARankThatDiesEndsTheJob) {
  const std::string where = tiny_corpus();
  const std::string run = folder_ / "r";
  {
    RunningProgram program(launch("one-each", 2, small_train(run, "100000steps")), where, environment());
    ASSERT_TRUE(program.wait_for_output("| step 3 ")) << program.output_so_far();
    program.send(SIGTERM);
    const ProgramResult result = program.wait(60);
    EXPECT_EQ(result.exit_code, 75) << result.out;
    EXPECT_FALSE(checkpoints(run).empty());
    expect_nothing_left(10);
  }
  RunningProgram program(launch("one-each", 2, small_train(run, "100000steps")), where, environment());
  ASSERT_TRUE(program.wait_for_output("| step ")) << program.output_so_far();
  const ProgramResult killed = shell(R"(
for pid in $(ip netns pids $B); do
  grep -qx cram_train /proc/$pid/comm && kill -9 $pid && echo killed
done
true)");
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(killed.out, "killed\n");
  const ProgramResult result = program.wait(100);
  EXPECT_NE(result.exit_code, 0) << result.out;
  EXPECT_NE(result.exit_code, 75) << result.out;
  EXPECT_NE(result.exit_code, -1) << "the job went on";
  expect_nothing_left(10);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

// The variables are what makes it work: with a wrong network or a wrong agent there is no run.
TEST_F(TwoHosts, AWrongNetworkOrAgentIsAnError) {
  const std::string where = tiny_corpus();
  const std::vector<std::string> argv = launch("one-each", 2, small_train(folder_ / "r", "2steps"));
  const ProgramResult network = run_program(argv, where, 60, environment("10.78.0.0/24"));
  EXPECT_NE(network.exit_code, 0) << network.out;
  EXPECT_NE(network.exit_code, -1) << network.out;
  auto other = environment();
  other.emplace_back("CRAM_RSH_AGENT", "/bin/false");
  const ProgramResult agent = run_program(argv, where, 60, other);
  EXPECT_NE(agent.exit_code, 0) << agent.out;
  EXPECT_NE(agent.exit_code, -1) << agent.out;
  EXPECT_FALSE(std::filesystem::exists(folder_ / "r"));
  expect_nothing_left(10);
}

}  // namespace
}  // namespace cram::test
