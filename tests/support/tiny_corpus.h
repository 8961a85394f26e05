// The corpus of the reports: 3,000 one-line documents, a vocabulary of 500, rows of 32 tokens, a model of two layers.
#pragma once

#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/run_program.h"

namespace cram::test {

/// Prepared once per test program: <folder>/c.txt, t (tokenizer), s (shards).
inline const std::string& tiny_corpus() {
  static const TemporaryFolder folder;
  static const std::string path = [] {
    std::ofstream text(folder / "c.txt");
    for (int i = 1; i <= 3000; ++i) {
      text << "row " << i << " the quick brown fox " << i % 97 << " jumps over dog " << i % 31 << "\n\n";
    }
    text.close();
    const std::string where = folder.path().string();
    const ProgramResult tokenizer =
        run_program({"cram_data", "tokenizer", "--input", "c.txt", "--output", "t", "--vocab-size", "500"}, where);
    EXPECT_EQ(tokenizer.exit_code, 0) << tokenizer.out;
    const ProgramResult pack = run_program(
        {"cram_data", "pack", "--input", "c.txt", "--tokenizer", "t", "--output", "s", "--seq-length", "32"}, where);
    EXPECT_EQ(pack.exit_code, 0) << pack.out;
    return where;
  }();
  return path;
}

/// cram_train on the tiny corpus, with one thread; later arguments override earlier ones.
inline std::vector<std::string> tiny_train(const std::string& output, std::vector<std::string> more) {
  std::vector<std::string> argv = {"cram_train",    "model.layers=2",       "model.hidden=64",
                                   "model.heads=2", "model.ffn=128",        "data.shards=s",
                                   "run.threads=1", "train.batch_size=128", "train.micro_batch_size=64",
                                   "train.lr=2e-3", "eval.rows=16",         "run.output=" + output};
  argv.insert(argv.end(), more.begin(), more.end());
  return argv;
}

/// Lines of metrics.jsonl of one kind.
inline std::vector<nlohmann::json> metrics(const std::string& run_folder, const std::string& kind) {
  std::vector<nlohmann::json> lines;
  std::ifstream file(run_folder + "/metrics.jsonl");
  std::string line;
  while (std::getline(file, line)) {
    nlohmann::json object = nlohmann::json::parse(line);
    if (object.at("kind") == kind) lines.push_back(std::move(object));
  }
  return lines;
}

/// What a run is compared by: step -> (loss, grad_norm, lr, batch_size) as 17-digit texts; of a step done again after a
/// resume the last line counts.
inline std::map<std::int64_t, std::string> loss_log(const std::string& run_folder) {
  std::map<std::int64_t, std::string> log;
  for (const nlohmann::json& line : metrics(run_folder, "train")) {
    char text[160];
    std::snprintf(text, sizeof text, "%.17g %.17g %.17g %lld", line.at("loss").get<double>(),
                  line.at("grad_norm").get<double>(), line.at("lr").get<double>(),
                  static_cast<long long>(line.at("batch_size").get<std::int64_t>()));
    log[line.at("step").get<std::int64_t>()] = text;
  }
  return log;
}

/// Committed checkpoint folders' names.
inline std::vector<std::string> checkpoints(const std::string& run_folder) {
  std::vector<std::string> names;
  const std::filesystem::path folder = run_folder + "/checkpoints";
  if (!std::filesystem::exists(folder)) return names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace cram::test
