// What a first user tripped over; each was wrong once.
#include <gtest/gtest.h>
#include <sys/mount.h>

#include "support/tiny_corpus.h"

namespace cram::test {
namespace {

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

std::vector<std::string> with(std::vector<std::string> argv, const std::vector<std::string>& more) {
  argv.insert(argv.end(), more.begin(), more.end());
  return argv;
}

ProgramResult shell(const std::string& command, const std::string& where) {
  return run_program({"/bin/sh", "-c", command}, where);
}

// A command line as a shell would read it.
std::string line(const std::vector<std::string>& argv) {
  std::string text = std::string(CRAM_PROGRAM_DIR) + "/" + argv[0];
  for (std::size_t i = 1; i < argv.size(); ++i) text += " '" + argv[i] + "'";
  return text;
}

TEST(Newcomer, RowsShorterThanTheShownSentencesTrain) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  ASSERT_EQ(run_program({"cram_data", "pack", "--input", "c.txt", "--tokenizer", "t", "--output", out / "s16",
                         "--seq-length", "16"},
                        where)
                .exit_code,
            0);
  const ProgramResult result = run_program(
      tiny_train(out / "r", {"data.shards=" + (out / "s16"), "train.budget=4steps", "eval.every=2steps"}), where);
  EXPECT_EQ(result.exit_code, 0) << result.out;
}

TEST(Newcomer, ARateThatMasksNothingIsRefused) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  const ProgramResult result =
      run_program(tiny_train(out / "r", {"train.mask_rate=0.01", "train.budget=2steps"}), where);
  EXPECT_EQ(result.exit_code, 2) << result.out;
  EXPECT_TRUE(contains(result.out, "train.mask_rate") && contains(result.out, "above 0.015625")) << result.out;
  EXPECT_FALSE(std::filesystem::exists(out / "r"));
}

TEST(Newcomer, ACopiedCheckpointIsSetAside) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  const std::vector<std::string> run = tiny_train(out / "r", {"train.budget=8steps", "checkpoint.every=2steps"});
  ASSERT_EQ(run_program(with(run, {"run.stop_after=4steps"}), where).exit_code, 0);
  std::filesystem::copy(out / "r/checkpoints/step-000000002", out / "r/checkpoints/step-000000099",
                        std::filesystem::copy_options::recursive);
  const ProgramResult resumed = run_program(run, where);
  EXPECT_EQ(resumed.exit_code, 0) << resumed.out;
  EXPECT_TRUE(contains(resumed.out, "holds step 2") && contains(resumed.out, "resuming after step 4")) << resumed.out;
}

// As nobody, because root may read everything.
TEST(Newcomer, WhatMayNotBeReadOrRenamedIsNotTakenForDamage) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  const std::vector<std::string> run = tiny_train(out / "r", {"train.budget=8steps", "checkpoint.every=2steps"});
  ASSERT_EQ(run_program(with(run, {"run.stop_after=4steps"}), where).exit_code, 0);
  const std::string as_nobody = "exec setpriv --reuid=65534 --regid=65534 --clear-groups ";
  if (::geteuid() != 0 ||
      shell("chmod -R a+rX " + where + "; chmod a+rx " + out.path().string() + "; chown -R 65534 " + (out / "r"), where)
              .exit_code != 0 ||
      shell(as_nobody + line({"cram_train", "--version"}), where).exit_code != 0 ||
      shell(as_nobody + "ls " + where + " " + (out / "r"), where).exit_code != 0) {
    GTEST_SKIP() << "needs root, and programs and data that nobody may read";
  }
  const std::string newest = out / "r/checkpoints/step-000000004";
  ASSERT_EQ(shell("chmod 0 " + newest + "/rank-00000.h5", where).exit_code, 0);
  const ProgramResult unreadable = shell(as_nobody + line(run), where);
  EXPECT_EQ(unreadable.exit_code, 20) << unreadable.out;
  EXPECT_TRUE(contains(unreadable.out, "make it readable")) << unreadable.out;
  EXPECT_TRUE(std::filesystem::exists(newest));

  ASSERT_EQ(shell("chmod 600 " + newest + "/rank-00000.h5; printf XXXX | dd of=" + newest +
                      "/rank-00000.h5 bs=1 seek=3000 conv=notrunc; chmod a-w " + (out / "r/checkpoints"),
                  where)
                .exit_code,
            0);
  const ProgramResult stuck = shell(as_nobody + line(run), where);
  EXPECT_EQ(stuck.exit_code, 20) << stuck.out;
  EXPECT_TRUE(contains(stuck.out, "could not be set aside") && contains(stuck.out, "step-000000002 is valid"))
      << stuck.out;
  EXPECT_FALSE(contains(stuck.out, "all damaged") || contains(stuck.out, "--fresh")) << stuck.out;
  ASSERT_EQ(shell("chmod u+w " + (out / "r/checkpoints"), where).exit_code, 0);
  const ProgramResult resumed = shell(as_nobody + line(run), where);
  EXPECT_EQ(resumed.exit_code, 0) << resumed.out;
  EXPECT_TRUE(contains(resumed.out, "resuming after step 2")) << resumed.out;
}

TEST(Newcomer, OnlyDamagedCheckpointsLeftIsNoFreshStart) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  const std::vector<std::string> run = tiny_train(out / "r", {"train.budget=4steps"});
  ASSERT_EQ(run_program(with(run, {"run.stop_after=2steps"}), where).exit_code, 0);
  std::filesystem::rename(out / "r/checkpoints/step-000000002", out / "r/checkpoints/step-000000002.damaged");
  EXPECT_EQ(run_program(run, where).exit_code, 20);
}

TEST(Newcomer, AFullDiskTearsNoLogLine) {
  if (::geteuid() != 0) GTEST_SKIP() << "mounting a small disk needs root";
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  std::filesystem::create_directories(out / "disk");
  if (::mount("none", (out / "disk").c_str(), "tmpfs", 0, "size=200k") != 0) GTEST_SKIP() << "no permission to mount";
  RunningProgram program(tiny_train(out / "disk/r", {"train.budget=100000steps", "eval.every=0", "checkpoint.every=0",
                                                     "log.every=50steps"}),
                         where);
  EXPECT_TRUE(program.wait_for_output("could not be written", 60)) << program.output_so_far();
  EXPECT_EQ(::mount("none", (out / "disk").c_str(), "tmpfs", MS_REMOUNT, "size=64m"), 0);
  EXPECT_TRUE(program.wait_for_output("writing works again", 30)) << program.output_so_far();
  program.send(SIGTERM);
  EXPECT_EQ(program.wait(30).exit_code, 75);
  EXPECT_GT(metrics(out / "disk/r", "train").size(), 10U);  // parses every line
  EXPECT_EQ(::umount((out / "disk").c_str()), 0);
}

TEST(Newcomer, ClosedDescriptorsAndLostReadersHarmNothing) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  const std::string closed = line(tiny_train(out / "closed", {"train.budget=30steps", "log.every=1steps"}));
  EXPECT_EQ(shell(closed + " <&- >&- 2>&-", where).exit_code, 0);
  EXPECT_EQ(metrics(out / "closed", "train").size(), 30U);
  const std::string piped = line(tiny_train(out / "piped", {"train.budget=30steps", "log.every=1steps"}));
  (void)shell(piped + " | head -n 1", where);
  EXPECT_EQ(metrics(out / "piped", "train").size(), 30U);
  EXPECT_EQ(metrics(out / "piped", "summary").size(), 1U);
  const ProgramResult limited =
      shell("ulimit -f 100; " + line(tiny_train(out / "limited", {"train.budget=2steps"})), where);
  EXPECT_EQ(limited.exit_code, 21) << limited.out;
}

TEST(Newcomer, ReplayRefusesADamagedLogBeforeAnythingIsWritten) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  const std::vector<std::string> bad = {
      "1 0 128\n2 0.5\n",     "1 0 128\n2 -0.1 128\n", "1 0 128\n2 0.9 128\n3 0.1 128\n",
      "1 0 128\n2 1.5 128\n", "1 0 128 7\n",           "1 0 7\n"};
  for (const std::string& content : bad) {
    std::ofstream(out / "clock.log") << content;
    const ProgramResult result =
        run_program(tiny_train(out / "r", {"train.budget=2s", "train.clock=replay:" + (out / "clock.log")}), where);
    EXPECT_EQ(result.exit_code, 2) << content << result.out;
    EXPECT_TRUE(metrics(out / "r", "train").empty()) << content;
  }
}

TEST(Newcomer, Fp64RunsExportAndBadSamplesWriteNothing) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  ASSERT_EQ(run_program(tiny_train(out / "r", {"train.budget=2steps", "train.precision=fp64"}), where).exit_code, 0);
  for (const char* rows : {"abc", "0", "-1", "1000000"}) {
    EXPECT_EQ(run_program({"cram_export", "--checkpoint", out / "r", "--output", out / "x", "--sample", rows}, where)
                  .exit_code,
              2);
    EXPECT_FALSE(std::filesystem::exists(out / "x")) << rows;
  }
  const ProgramResult good =
      run_program({"cram_export", "--checkpoint", out / "r", "--output", out / "x", "--sample", "2"}, where);
  EXPECT_EQ(good.exit_code, 0) << good.out;
  EXPECT_TRUE(std::filesystem::exists(out / "x/sample.safetensors"));
  // A sample must not outlive the model it belongs to.
  EXPECT_EQ(run_program({"cram_export", "--checkpoint", out / "r", "--output", out / "x"}, where).exit_code, 0);
  EXPECT_FALSE(std::filesystem::exists(out / "x/sample.safetensors"));
}

TEST(Newcomer, FreshOnALinkedRunStaysBehindTheLink) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  std::filesystem::create_directories(out / "other");
  std::filesystem::create_directory_symlink(out / "other/real", out / "link");
  std::filesystem::create_directories(out / "other/real");
  ASSERT_EQ(run_program(tiny_train(out / "link", {"train.budget=2steps"}), where).exit_code, 0);
  ASSERT_EQ(run_program(with(tiny_train(out / "link", {"train.budget=3steps"}), {"--fresh"}), where).exit_code, 0);
  EXPECT_TRUE(std::filesystem::is_symlink(out / "link"));
  EXPECT_EQ(metrics(out / "other/real", "train").size(), 3U);
  EXPECT_EQ(metrics(out / "other/real.old-1", "train").size(), 2U);
}

TEST(Newcomer, TwoPackersInOneFolderAreToldApart) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  std::ofstream big(out / "big.txt");
  for (int i = 0; i < 40000; ++i) big << "line " << i << " the quick brown fox jumps over the lazy dog\n\n";
  big.close();
  const auto pack = [&](const std::string& seed) {
    return std::vector<std::string>{"cram_data",    "pack", "--input",  out / "big.txt",
                                    "--tokenizer",  "t",    "--output", out / "s",
                                    "--seq-length", "32",   "--seed",   seed};
  };
  RunningProgram first(pack("1"), where), second(pack("2"), where);
  const ProgramResult a = first.wait(), b = second.wait();
  // One wins; the other is refused as a second writer, or because something else is there by then.
  EXPECT_EQ(std::min(a.exit_code, b.exit_code), 0) << a.out << b.out;
  EXPECT_EQ(std::max(a.exit_code, b.exit_code), 2) << a.out << b.out;
  EXPECT_EQ(run_program({"cram_data", "verify", out / "s"}, where).exit_code, 0);
}

TEST(Newcomer, InspectAndPackSayWhatIsWrong) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  EXPECT_EQ(run_program({"cram_data", "inspect", "s", "--samples", "1000000"}, where).exit_code, 2);
  EXPECT_EQ(run_program({"cram_data", "inspect", "s", "--split", "test"}, where).exit_code, 2);
  std::ofstream same(out / "same.txt");
  for (int i = 0; i < 3000; ++i) same << "the very same line of text again and again\n\n";
  same.close();
  const ProgramResult result = run_program({"cram_data", "pack", "--input", out / "same.txt", "--tokenizer", "t",
                                            "--output", out / "s", "--seq-length", "32"},
                                           where);
  EXPECT_EQ(result.exit_code, 22) << result.out;
  EXPECT_TRUE(contains(result.out, "identical documents stay on one side")) << result.out;
}

TEST(Newcomer, ASignalDuringStartUpIsAnsweredWith75) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  // Large enough that building it takes a moment after the first line was printed.
  RunningProgram program(
      tiny_train(out / "r", {"model.hidden=512", "model.layers=8", "model.ffn=2048", "train.budget=9steps"}), where);
  ASSERT_TRUE(program.wait_for_output("device cpu")) << program.output_so_far();
  program.send(SIGTERM);
  const ProgramResult result = program.wait(60);
  EXPECT_EQ(result.exit_code, 75) << result.out;
}

}  // namespace
}  // namespace cram::test
