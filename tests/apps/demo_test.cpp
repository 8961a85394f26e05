// The demo configuration on the shipped corpus ends inside the band that configs/demo.toml states.
#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <sstream>

#include "support/tiny_corpus.h"

namespace cram::test {
namespace {

TEST(Demo, HeldOutLossIsInTheStatedBand) {
  const TemporaryFolder out;
  const std::string source = CRAM_SOURCE_DIR;
  std::ostringstream text;
  text << std::ifstream(source + "/configs/demo.toml").rdbuf();
  const std::string config = text.str();
  const std::size_t stated = config.find("budget=");
  ASSERT_NE(stated, std::string::npos);
  int steps = 0;
  double low = 0, high = 0;
  ASSERT_EQ(std::sscanf(config.c_str() + stated, "budget=%dsteps: %lf to %lf nats", &steps, &low, &high), 3);

  const ProgramResult tokenizer = run_program(
      {"cram_data", "tokenizer", "--input", source + "/data/demo", "--output", out / "t", "--vocab-size", "4096"},
      source);
  ASSERT_EQ(tokenizer.exit_code, 0) << tokenizer.out;
  const ProgramResult pack =
      run_program({"cram_data", "pack", "--input", source + "/data/demo", "--tokenizer", out / "t", "--output",
                   out / "s", "--seq-length", "128", "--validation", "0.08"},
                  source);
  ASSERT_EQ(pack.exit_code, 0) << pack.out;
  const ProgramResult train =
      run_program({"cram_train", "--config", source + "/configs/demo.toml", "data.shards=" + (out / "s"),
                   "run.output=" + (out / "r"), "train.budget=" + std::to_string(steps) + "steps", "eval.every=0steps"},
                  source, 550, {{"OMP_NUM_THREADS", "2"}});
  ASSERT_EQ(train.exit_code, 0) << train.out;
  const double loss = metrics(out / "r", "summary").back().at("eval_loss").get<double>();
  EXPECT_GE(loss, low);
  EXPECT_LE(loss, high);
  EXPECT_NE(train.out.find("unigram frequencies 6.5"), std::string::npos) << train.out;
}

}  // namespace
}  // namespace cram::test
