// The choice of an automatic micro-batch from made-up speeds, its candidates in layouts, and what is remembered.
#include "train/micro_batch_search.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "support/expect_error.h"
#include "support/temporary_folder.h"

namespace cram::test {
namespace {

using Sizes = std::vector<std::int64_t>;

Config with(std::int64_t quantum) {
  Config config;
  config.train.batch_size = config.train.batch_quantum = quantum;
  config.train.micro_batch_size = kAutoMicroBatch;
  config.model.vocab_size = 4096;
  config.model.seq_length = 128;
  return config;
}

TEST(Candidates, ArePowersOfTwoThatDivideARanksShare) {
  EXPECT_EQ(micro_batch_candidates(with(128), Layout{}), (Sizes{8, 16, 32, 64, 128}));
  EXPECT_EQ(micro_batch_candidates(with(8192), Layout{}), (Sizes{8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096}));
  EXPECT_EQ(micro_batch_candidates(with(24), Layout{}), (Sizes{8, 24}));
  EXPECT_EQ(micro_batch_candidates(with(4), Layout{}), (Sizes{1, 2, 4}));
  EXPECT_EQ(micro_batch_candidates(with(1), Layout{}), (Sizes{1}));
  Layout data;
  data.data = 4;
  EXPECT_EQ(micro_batch_candidates(with(128), data), (Sizes{8, 16, 32}));
  Config interleaved = with(128);
  interleaved.parallel.virtual_stages = 2;
  Layout stages;
  stages.pipeline = 4;
  EXPECT_EQ(micro_batch_candidates(interleaved, stages), (Sizes{8, 16, 32}));
}

TEST(Candidates, OfSequenceParallelismCanBeSharedOut) {
  Config config = with(16);
  config.model.seq_length = 6;
  config.parallel.sequence_parallel = true;
  Layout tensor;
  tensor.tensor = 4;  // 6 tokens x 2 rows is the first multiple of 4
  EXPECT_EQ(micro_batch_candidates(config, tensor), (Sizes{8, 16}));
  config.train.batch_quantum = 2;
  EXPECT_EQ(micro_batch_candidates(config, tensor), (Sizes{2}));
  config.train.batch_quantum = 1;
  expect_error(ExitCode::kUsage, {"tensor ranks"}, [&] { (void)micro_batch_candidates(config, tensor); });
}

TEST(Candidates, TheNearestOneStandsInForAnotherLayoutsSize) {
  EXPECT_EQ(nearest_micro_batch(with(128), Layout{}, 64), 64);
  EXPECT_EQ(nearest_micro_batch(with(32), Layout{}, 64), 32);
  EXPECT_EQ(nearest_micro_batch(with(24), Layout{}, 10), 8);
}

// Speeds by size; the sizes that were measured.
struct Measured {
  MicroBatchFound found;
  Sizes asked;
};

Measured search(const Sizes& candidates, const std::vector<double>& speeds, std::int64_t ends_before = 1'000'000) {
  Measured measured;
  measured.found = search_micro_batch(
      candidates,
      [&](std::int64_t rows) -> std::optional<double> {
        measured.asked.push_back(rows);
        for (std::size_t i = 0; i < speeds.size(); ++i) {
          if (candidates[i] == rows) return speeds[i];
        }
        return std::nullopt;  // beyond the given speeds it does not fit
      },
      [&](std::int64_t next) { return next >= ends_before; });
  return measured;
}

TEST(Search, TakesTheFastest) {
  EXPECT_EQ(search({8, 16, 32, 64}, {100, 150, 200, 180}).found.rows, 32);
  EXPECT_EQ(search({8, 16, 32, 64}, {100, 150, 200, 280}).found.rows, 64);
}

TEST(Search, TakesTheSmallestOfNearlyEqualOnes) {
  EXPECT_EQ(search({8, 16, 32, 64}, {100, 197, 200, 199}).found.rows, 16);
  EXPECT_EQ(search({8, 16, 32, 64}, {100, 195, 200, 199}).found.rows, 32);
}

TEST(Search, StopsAfterTwoSlowerOnesInARow) {
  EXPECT_EQ(search({8, 16, 32, 64, 128}, {100, 90, 80, 500, 600}).asked, (Sizes{8, 16, 32}));
  // One dip is noise.
  const Measured dip = search({8, 16, 32, 64, 128}, {100, 90, 120, 110, 130});
  EXPECT_EQ(dip.asked, (Sizes{8, 16, 32, 64, 128}));
  EXPECT_EQ(dip.found.rows, 128);
}

TEST(Search, EndsWhereTheMemoryOrTheTimeDoes) {
  EXPECT_EQ(search({8, 16, 32, 64}, {100, 200}).found.rows, 16);
  EXPECT_EQ(search({8, 16, 32, 64}, {100, 200, 300, 400}, 32).found.rows, 16);
  // The first one is always measured, whatever the time.
  EXPECT_EQ(search({8, 16}, {100, 200}, 0).found.rows, 8);
  expect_error(ExitCode::kUsage, {"not even 8 rows fit"}, [] { (void)search({8, 16}, {}); });
}

TEST(Cache, RemembersByKey) {
  const TemporaryFolder folder;
  const MicroBatchCache cache(folder / "new/folder/cache.json");
  EXPECT_FALSE(cache.find("a"));
  cache.remember("a", 64);
  cache.remember("b", 32);
  cache.remember("a", 128);
  EXPECT_EQ(MicroBatchCache(cache.file()).find("a"), 128);
  EXPECT_EQ(cache.find("b"), 32);
  EXPECT_FALSE(cache.find("c"));
}

TEST(Cache, DamageAndReadOnlyFoldersAreNoErrors) {
  const TemporaryFolder folder;
  const std::string file = folder / "cache.json";
  for (const char* content : {"", "{", "[1,2]", "{\"a\": \"64\"}", "{\"a\": 1.5}"}) {
    std::ofstream(file, std::ios::trunc) << content;
    EXPECT_FALSE(MicroBatchCache(file).find("a")) << content;
  }
  MicroBatchCache(file).remember("a", 16);
  EXPECT_EQ(MicroBatchCache(file).find("a"), 16);
  MicroBatchCache("/proc/no/such/cache.json").remember("a", 16);
  MicroBatchCache("").remember("a", 16);
  EXPECT_FALSE(MicroBatchCache("").find("a"));
}

TEST(Cache, KeysTellEverythingApartThatTheSpeedDependsOn) {
  const auto key = [](auto change) {
    Config config = with(128);
    Layout layout;
    std::string device = "cpu";
    change(config, layout, device);
    return micro_batch_key(config, layout, device);
  };
  const std::string plain = key([](Config&, Layout&, std::string&) {});
  EXPECT_EQ(plain, key([](Config& c, Layout&, std::string&) { c.train.lr = 2; }));
  EXPECT_NE(plain, key([](Config& c, Layout&, std::string&) { c.model.layers = 2; }));
  EXPECT_NE(plain, key([](Config& c, Layout&, std::string&) { c.train.precision = "fp32"; }));
  EXPECT_NE(plain, key([](Config& c, Layout&, std::string&) { c.parallel.zero = 1; }));
  EXPECT_NE(plain, key([](Config&, Layout& l, std::string&) { l.data = 2; }));
  EXPECT_NE(plain, key([](Config&, Layout&, std::string& d) { d = "NVIDIA H100"; }));
}

}  // namespace
}  // namespace cram::test
