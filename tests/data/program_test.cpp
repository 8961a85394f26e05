// The cases of people's reports, through the real program.
#include <gtest/gtest.h>

#include "data/tokenizer.h"
#include "data_support.h"
#include "support/run_program.h"

namespace cram {
namespace {

using testing::TemporaryFolder;

using Outcome = test::ProgramResult;

class ProgramTest : public ::testing::Test {
 protected:
  /// Runs a line of bash in the temporary folder; `cram_data` is ours.
  [[nodiscard]] Outcome run(const std::string& line) const {
    const std::string script = "export PATH='" CRAM_PROGRAM_DIR "':\"$PATH\"\n" + line;
    return test::run_program({"/bin/bash", "-c", script}, folder_.path());
  }
  /// The prelude of the cases page.
  void prelude() const {
    const Outcome made = run(
        R"(seq 3000 | awk '{print "row",$1,"the quick brown fox",$1%97,"jumps over dog",$1%31; print ""}' > c.txt &&)"
        " cram_data tokenizer --input c.txt --output t --vocab-size 500 &&"
        " cram_data pack --input c.txt --tokenizer t --output s --seq-length 32");
    ASSERT_EQ(made.exit_code, 0) << made.out;
  }
  static bool has(const Outcome& outcome, const std::string& text) {
    return outcome.out.find(text) != std::string::npos;
  }
  TemporaryFolder folder_;
};

TEST_F(ProgramTest, VocabularyLargerThanTheText) {
  Outcome outcome =
      run(R"(printf 'red fox\nblue dog\n' > k.txt; cram_data tokenizer --input k.txt --output k --vocab-size 30000)");
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_TRUE(has(outcome, "30000")) << outcome.out;
  EXPECT_TRUE(has(outcome, "largest possible size is 41")) << outcome.out;
  EXPECT_TRUE(has(outcome, "--soft-vocab"));
  EXPECT_FALSE(std::filesystem::exists(folder_.path("k")) && !std::filesystem::is_empty(folder_.path("k")));
  outcome = run("cram_data tokenizer --input k.txt --output k --vocab-size 30000 --soft-vocab");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.out;
  EXPECT_EQ(Tokenizer::load(folder_.path("k")).vocab_size(), 41);
}

TEST_F(ProgramTest, HostileBytes) {
  Outcome outcome = run(R"(printf 'good line\r\nbad \xff\xfe bytes\nnul \0 inside\n\n\xef\xbb\xbfbom line\n' > d.txt; )"
                        R"(seq 3000 | sed 's/^/filler words number /' >> d.txt; )"
                        "cram_data tokenizer --input d.txt --output d1 --vocab-size 300 --threads 1");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.out;
  EXPECT_TRUE(has(outcome, "2 invalid bytes, 1 NULs, 1 empty lines")) << outcome.out;
  EXPECT_EQ(run("cram_data tokenizer --input d.txt --output d2 --vocab-size 300 --threads 3").exit_code, 0);
  EXPECT_EQ(
      run("OMP_NUM_THREADS=7 cram_data tokenizer --input d.txt --output d3 --vocab-size 300 --threads 8").exit_code, 0);
  const std::string model = read_file(folder_.path("d1/tokenizer.model"));
  EXPECT_EQ(read_file(folder_.path("d2/tokenizer.model")), model);
  EXPECT_EQ(read_file(folder_.path("d3/tokenizer.model")), model);
  const Tokenizer tokenizer = Tokenizer::load(folder_.path("d1"));
  for (std::uint32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    const std::string& piece = tokenizer.piece(id);
    EXPECT_EQ(piece.find('\r'), std::string::npos);
    EXPECT_EQ(piece.find('\0'), std::string::npos);
    EXPECT_EQ(piece.find("\xEF\xBB\xBF"), std::string::npos);
  }
}

TEST_F(ProgramTest, TooLittleText) {
  prelude();
  const Outcome outcome =
      run("echo 'one short line' > k.txt; cram_data pack --input k.txt --tokenizer t --output k --seq-length 128");
  EXPECT_EQ(outcome.exit_code, 22);
  EXPECT_TRUE(has(outcome, "16 tokens")) << outcome.out;
  EXPECT_TRUE(has(outcome, "needs at least 128")) << outcome.out;
  EXPECT_FALSE(std::filesystem::exists(folder_.path("k")) && !std::filesystem::is_empty(folder_.path("k")));
}

TEST_F(ProgramTest, LockedAndReadOnlyShards) {
  prelude();
  const Outcome outcome =
      run("chmod a-w s; for f in s/*.h5; do flock -x $f sleep 3 & done; sleep 0.3; timeout 2 cram_data verify s");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.out;
}

TEST_F(ProgramTest, InputsInEveryForm) {
  prelude();
  const std::string pack = "cram_data pack --tokenizer t --seq-length 32 ";
  EXPECT_EQ(run("cat c.txt | " + pack + "--input - --output a && cmp a/train-00000.h5 s/train-00000.h5").exit_code, 0);
  EXPECT_EQ(run("gzip -c c.txt | " + pack + "--input - --output b && cmp b/train-00000.h5 s/train-00000.h5").exit_code,
            0);
  // Several words after --input, and two --input: documents are ordered by content, so the halves give the whole.
  EXPECT_EQ(run("head -3000 c.txt > c1.txt; tail -n +3001 c.txt > c2.txt; " + pack +
                "--input c1.txt c2.txt --output d && cmp d/train-00000.h5 s/train-00000.h5")
                .exit_code,
            0);
  EXPECT_EQ(run(pack + "--input=c1.txt --input c2.txt --output e && cmp e/train-00000.h5 s/train-00000.h5").exit_code,
            0);
  EXPECT_EQ(run("mkdir -p in/x; cp c1.txt in/x; gzip c2.txt; mv c2.txt.gz in; " + pack +
                "--input in --output f && cmp f/train-00000.h5 s/train-00000.h5")
                .exit_code,
            0);
}

TEST_F(ProgramTest, VerifyAndInspect) {
  prelude();
  Outcome outcome = run("cram_data verify s && cram_data verify t");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.out;
  outcome = run("cram_data inspect s --samples 2");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.out;
  EXPECT_TRUE(has(outcome, "the quick brown fox"));
  EXPECT_FALSE(has(outcome, "[MASK]"));
  outcome = run("cram_data inspect s --samples 2 --masked");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.out;
  EXPECT_TRUE(has(outcome, "[MASK]"));
  EXPECT_EQ(run("cram_data inspect t --samples 3").exit_code, 0);
  testing::flip_bit(folder_.path("s/train-00000.h5"), 40000);
  outcome = run("cram_data verify s");
  EXPECT_EQ(outcome.exit_code, 22);
  EXPECT_TRUE(has(outcome, "train-00000.h5")) << outcome.out;
  std::filesystem::remove(folder_.path("s/validation-00000.h5"));
  outcome = run("cram_data verify s");
  EXPECT_EQ(outcome.exit_code, 22);
  EXPECT_TRUE(has(outcome, "validation-00000.h5 is missing") && has(outcome, "train-00000.h5")) << "all faults at once";
}

TEST_F(ProgramTest, TheCommandLineIsStrict) {
  prelude();
  const std::pair<const char*, const char*> wrong[] = {
      {"cram_data", "tokenizer, pack, verify or inspect"},
      {"cram_data tokenizr --input c.txt", "nearest is tokenizer"},
      {"cram_data pack --inptu c.txt", "nearest is --input"},
      {"cram_data pack --input c.txt --output o", "--tokenizer is missing"},
      {"cram_data pack --input c.txt --tokenizer t --output o --filter 1,5", "1,5"},
      {"cram_data pack --input c.txt --tokenizer t --output o --validation 1e-3x", "1e-3x"},
      {"cram_data pack --input c.txt --tokenizer t --output o --seq-length 12.5", "12.5"},
      {"cram_data pack --input c.txt --tokenizer t --output o --order sorted", "nearest"},
      {"cram_data pack --input c.txt --tokenizer t --output o --seq-length", "seq-length"},
      {"cram_data tokenizer --input c.txt --output o --vocab-size 5", "vocabulary size"},
      {"cram_data tokenizer --input c.txt --output o --type word", "bpe or unigram"},
      {"cram_data verify", "one folder"},
      {"cram_data verify s t", "one folder"},
      {"cram_data pack --input c.txt --tokenizer t --output s --seq-length 64 --force=yes --order \"$(head -c 120000 "
       "/dev/zero | tr '\\0' a)\"",
       ""},
  };
  for (const auto& [line, expected] : wrong) {
    const Outcome outcome = run(line);
    EXPECT_EQ(outcome.exit_code, 2) << line << "\n" << outcome.out.substr(0, 500);
    EXPECT_TRUE(has(outcome, expected)) << line << "\n" << outcome.out.substr(0, 500);
  }
  EXPECT_FALSE(std::filesystem::exists(folder_.path("o")));
  EXPECT_EQ(run("cram_data verify nothing").exit_code, 22);
  EXPECT_EQ(run("cram_data pack --input nothing --tokenizer t --output o").exit_code, 22);
  for (const char* line :
       {"cram_data --help", "cram_data pack --help", "cram_data tokenizer --help", "cram_data verify --help",
        "cram_data inspect --help", "cram_data --version", "cram_data pack --version"}) {
    EXPECT_EQ(run(line).exit_code, 0) << line;
  }
}

TEST_F(ProgramTest, AFullDiskLeavesNothingThatLooksWhole) {
  prelude();
  const std::string pack = "cram_data pack --input c.txt --tokenizer t --output o --seq-length 32";
  // No file may grow beyond so many kB: the tokenizer (8 kB) or a shard (98 kB) does not fit. With SIGXFSZ ignored, the
  // write itself fails, as on a full disk.
  for (const int limit : {1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 72, 80, 88, 96}) {
    const Outcome outcome = run("trap '' XFSZ; ulimit -f " + std::to_string(limit) + "; " + pack);
    EXPECT_EQ(outcome.exit_code, 22) << limit << "\n" << outcome.out;
    EXPECT_TRUE(has(outcome, " failed: ")) << outcome.out;
    // validation-00000.h5 fits before train-00000.h5 does not: whole, but without a manifest nobody reads it.
    EXPECT_EQ(run("ls -A o | grep -v -x -e tokenizer.model -e validation-00000.h5").out, "") << limit;
  }
  EXPECT_EQ(run(pack + " && cmp o/train-00000.h5 s/train-00000.h5 && cram_data verify o").exit_code, 0);
}

TEST_F(ProgramTest, KilledAtAnyTimeTheNextRunFinishes) {
  prelude();
  const std::string pack =
      "cram_data pack --input c.txt --tokenizer t --seq-length 32 --rows-per-shard 100 --threads 1 --output ";
  ASSERT_EQ(run(pack + "whole").exit_code, 0);
  for (int delay = 1; delay <= 20; ++delay) {
    static_cast<void>(run("rm -rf o; timeout -s KILL " + std::to_string(0.006 * delay) + " " + pack + "o"));
    const Outcome outcome = run(pack + "o && diff -r o whole");
    EXPECT_EQ(outcome.exit_code, 0) << delay << "\n" << outcome.out;
  }
}

}  // namespace
}  // namespace cram
