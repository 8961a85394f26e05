#include <gtest/gtest.h>

#include <cmath>

#include "base/digest.h"
#include "base/hdf5_file.h"
#include "support/tiny_corpus.h"

namespace cram::test {
namespace {

std::string step_folder(const std::string& run, std::int64_t step) {
  const std::string digits = std::to_string(step);
  return run + "/checkpoints/step-" + std::string(9 - digits.size(), '0') + digits;
}

// sqrt of the sum of squares of the first moments of every parameter.
double moment_norm(const std::string& folder) {
  const nlohmann::json index = nlohmann::json::parse(std::ifstream(folder + "/rank-00000.json"));
  const ArrayFileReader reader(folder + "/rank-00000.h5", ExitCode::kOther);
  double sum = 0;
  for (const nlohmann::json& parameter : index.at("arrays")) {
    const std::string path = "/exp_avg/" + parameter.at("name").get<std::string>();
    const ArrayInfo info = reader.info(path);
    std::size_t count = 1;
    for (const std::int64_t extent : info.shape) count *= static_cast<std::size_t>(extent);
    std::vector<double> values(count);
    reader.read(path, info, values.data());
    for (const double value : values) sum += value * value;
  }
  return std::sqrt(sum);
}

// After one step exp_avg is (1 - beta1) times the clipped gradient of the mean.
TEST(Clip, TheFirstMomentHasTheNormOfTheClippedMeanGradient) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  for (const char* clip : {"0", "1e-2", "1e6"}) {
    const ProgramResult result =
        run_program(tiny_train(out / clip, {"train.budget=4steps", "run.stop_after=1steps", "train.precision=fp64",
                                            "train.batch_ramp=0", std::string("train.clip=") + clip}),
                    where);
    ASSERT_EQ(result.exit_code, 0) << result.out;
    const double norm = metrics(out / clip, "train").back().at("grad_norm").get<double>();
    const double limit = std::stod(clip);
    const double expected = limit > 0 && norm > limit ? limit * norm / (norm + 1e-6) : norm;
    ASSERT_GT(norm, 2e-2);
    EXPECT_NEAR(moment_norm(step_folder(out / clip, 1)) / 0.1 / expected, 1, 1e-9) << clip;
  }
}

// keep = 1 - lr*weight_decay = -999 multiplies the weights until they overflow.
TEST(NonFinite, ASkippedStepLeavesWeightsAndMomentsAloneAndFiveHalt) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  const ProgramResult result = run_program(
      tiny_train(out / "r", {"train.budget=1000steps", "train.precision=fp32", "train.lr=1e3", "train.weight_decay=1",
                             "train.schedule=constant", "checkpoint.every=1steps", "checkpoint.keep=1000"}),
      where);
  ASSERT_EQ(result.exit_code, static_cast<int>(ExitCode::kNonFinite)) << result.out;
  std::vector<std::int64_t> skipped;
  for (const nlohmann::json& event : metrics(out / "r", "event"))
    if (event.at("event") == "non-finite") skipped.push_back(event.at("step").get<std::int64_t>() + 1);
  ASSERT_GE(skipped.size(), 5U);
  const auto digest = [&](std::int64_t step) { return digest_file(step_folder(out / "r", step) + "/rank-00000.h5"); };
  const std::int64_t first = skipped[skipped.size() - 5];
  EXPECT_EQ(skipped.back(), first + 4) << "the last five are in a row";
  for (std::int64_t step = first; step < first + 4; ++step) EXPECT_EQ(digest(step), digest(first - 1)) << step;
  EXPECT_NE(digest(first - 1), digest(first - 2));
}

TEST(Evaluation, DoesNotDependOnTheRunsSeed) {
  const std::string where = tiny_corpus();
  const TemporaryFolder out;
  const std::vector<std::string> run = tiny_train(out / "r", {"train.budget=3steps"});
  ASSERT_EQ(run_program(run, where).exit_code, 0);
  std::vector<std::string> again = run;
  again.insert(again.end(), {"run.seed=7", "--force"});
  const ProgramResult result = run_program(again, where);
  ASSERT_EQ(result.exit_code, 0) << result.out;
  const auto summaries = metrics(out / "r", "summary");
  ASSERT_EQ(summaries.size(), 2U);
  EXPECT_EQ(summaries[0].at("steps"), summaries[1].at("steps"));
  EXPECT_EQ(summaries[0].at("eval_loss"), summaries[1].at("eval_loss"));
}

}  // namespace
}  // namespace cram::test
