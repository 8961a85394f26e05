#include "data/loader.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "data/sampler.h"
#include "data_support.h"

namespace cram {
namespace {

using testing::counting_rows;
using testing::error_of;
using testing::TemporaryFolder;
using testing::write_prepared;

constexpr std::int64_t kRows = 103;
constexpr std::int64_t kSeqLength = 8;

TEST(SamplerTest, EveryRowOnceAnEpochForEveryLayout) {
  for (const bool shuffle : {false, true}) {
    for (int dp_size = 1; dp_size <= 4; ++dp_size) {
      const std::int64_t micro_batch = 5;
      std::map<std::int64_t, std::multiset<std::int64_t>> rows_of_epoch;
      // Enough micro-steps for three whole epochs; batches straddle them because 5 does not divide 103.
      const std::int64_t steps = (3 * kRows + micro_batch * dp_size - 1) / (micro_batch * dp_size);
      for (int dp_rank = 0; dp_rank < dp_size; ++dp_rank) {
        Sampler sampler(kRows, 9, shuffle);
        for (std::int64_t j = 0; j < steps; ++j) {
          for (std::int64_t i = 0; i < micro_batch; ++i) {
            const SampleId id = sampler.at((j * dp_size + dp_rank) * micro_batch + i);
            rows_of_epoch[id.epoch].insert(id.row);
          }
        }
      }
      for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
        std::multiset<std::int64_t> expected;
        for (std::int64_t row = 0; row < kRows; ++row) expected.insert(row);
        EXPECT_EQ(rows_of_epoch[epoch], expected) << "dp " << dp_size << " shuffle " << shuffle << " epoch " << epoch;
      }
    }
  }
}

TEST(SamplerTest, PreparedOrderAndShuffledOrder) {
  Sampler prepared(kRows, 9, false);
  EXPECT_EQ(prepared.at(0), (SampleId{0, 0}));
  EXPECT_EQ(prepared.at(kRows - 1), (SampleId{0, kRows - 1}));
  EXPECT_EQ(prepared.at(kRows), (SampleId{1, 0}));
  EXPECT_EQ(prepared.at(5 * kRows + 7), (SampleId{5, 7}));

  const auto epoch_order = [](std::uint64_t seed, std::int64_t epoch) {
    Sampler sampler(kRows, seed, true);
    std::vector<std::int64_t> order;
    for (std::int64_t i = 0; i < kRows; ++i) order.push_back(sampler.at(epoch * kRows + i).row);
    return order;
  };
  EXPECT_NE(epoch_order(9, 0), epoch_order(9, 1));
  EXPECT_NE(epoch_order(9, 0), epoch_order(10, 0));
  EXPECT_EQ(epoch_order(9, 1), epoch_order(9, 1));
  // Going back and forth over an epoch's end gives the same map.
  Sampler sampler(kRows, 9, true);
  const SampleId before = sampler.at(kRows - 1);
  static_cast<void>(sampler.at(kRows));
  EXPECT_EQ(sampler.at(kRows - 1), before);
  EXPECT_THROW(Sampler(0, 0, false), Error);
}

class LoaderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    write_prepared(folder_.path(), counting_rows(kRows, kSeqLength, 50), counting_rows(3, kSeqLength, 50),
                   {kSeqLength, 50, 40});
  }

  std::shared_ptr<ShardSet> shards() const {
    return std::make_shared<ShardSet>(ShardSet::open(folder_.path(), "train"));
  }
  static LoaderSettings settings(int prefetch = 4, bool shuffle = false) {
    LoaderSettings s;
    s.micro_batch = 6;
    s.seed = 5;
    s.mask_rate = 0.25;
    s.shuffle = shuffle;
    s.prefetch = prefetch;
    return s;
  }

  /// One row of a stream: its masked ids, and its labels with their positions in the row.
  struct Row {
    std::vector<std::int64_t> ids;
    std::vector<std::int64_t> positions;
    std::vector<std::int64_t> labels;
    bool operator==(const Row&) const = default;
  };
  static std::vector<std::int64_t> values(const at::Tensor& tensor) {
    const auto* data = tensor.const_data_ptr<std::int64_t>();
    return {data, data + tensor.numel()};
  }
  static std::vector<Row> rows_of(const Batch& batch) {
    std::vector<Row> rows(static_cast<std::size_t>(batch.rows));
    const std::vector<std::int64_t> ids = values(batch["ids"]);
    const std::vector<std::int64_t> positions = values(batch["positions"]);
    const std::vector<std::int64_t> labels = values(batch["labels"]);
    EXPECT_TRUE(std::is_sorted(positions.begin(), positions.end()));
    EXPECT_EQ(positions.size(), labels.size());
    for (std::size_t b = 0; b < rows.size(); ++b) {
      const auto first = static_cast<std::ptrdiff_t>(b) * kSeqLength;
      rows[b].ids.assign(ids.begin() + first, ids.begin() + first + kSeqLength);
    }
    for (std::size_t i = 0; i < positions.size(); ++i) {
      Row& row = rows[static_cast<std::size_t>(positions[i] / kSeqLength)];
      row.positions.push_back(positions[i] % kSeqLength);
      row.labels.push_back(labels[i]);
    }
    return rows;
  }
  std::vector<Row> stream(const LoaderSettings& s, std::int64_t first_sample, int batches) const {
    Loader loader(shards(), s, first_sample);
    std::vector<Row> rows;
    for (int i = 0; i < batches; ++i) {
      for (Row& row : rows_of(loader.next())) rows.push_back(std::move(row));
    }
    return rows;
  }

  TemporaryFolder folder_;
};

TEST_F(LoaderTest, BatchesHaveTheShapesOfTheContract) {
  Loader loader(shards(), settings(), 0);
  const Batch batch = loader.next();
  EXPECT_EQ(batch.rows, 6);
  EXPECT_EQ(batch["ids"].sizes(), (at::IntArrayRef{6, kSeqLength}));
  EXPECT_EQ(batch["labels"].sizes(), (at::IntArrayRef{12}));
  EXPECT_EQ(batch["positions"].sizes(), (at::IntArrayRef{12}));
  EXPECT_EQ(batch["ids"].scalar_type(), at::kLong);
  for (const Row& row : rows_of(batch)) EXPECT_EQ(row.positions.size(), 2U);
}

TEST_F(LoaderTest, RestoringTheLabelsGivesTheRows) {
  const testing::Rows expected = counting_rows(kRows, kSeqLength, 50);
  const std::vector<Row> rows = stream(settings(), 0, 40);  // two epochs and more
  for (std::size_t g = 0; g < rows.size(); ++g) {
    Row row = rows[g];
    for (std::size_t i = 0; i < row.positions.size(); ++i)
      row.ids[static_cast<std::size_t>(row.positions[i])] = row.labels[i];
    const auto& original = expected[g % kRows];
    ASSERT_TRUE(std::equal(original.begin(), original.end(), row.ids.begin())) << g;
  }
}

TEST_F(LoaderTest, PrefetchDoesNotChangeTheStream) {
  for (const bool shuffle : {false, true}) {
    const std::vector<Row> reference = stream(settings(0, shuffle), 3, 40);
    for (int prefetch = 1; prefetch <= 4; ++prefetch) {
      EXPECT_EQ(stream(settings(prefetch, shuffle), 3, 40), reference) << prefetch;
    }
  }
}

TEST_F(LoaderTest, TheRanksTogetherReadTheStreamOfOne) {
  const std::vector<Row> reference = stream(settings(4, true), 7, 36);
  for (int dp_size = 2; dp_size <= 4; ++dp_size) {
    std::vector<Row> joined(reference.size());
    for (int dp_rank = 0; dp_rank < dp_size; ++dp_rank) {
      LoaderSettings s = settings(2, true);
      s.dp_rank = dp_rank;
      s.dp_size = dp_size;
      const std::vector<Row> own = stream(s, 7, 36 / dp_size);
      for (std::size_t i = 0; i < own.size(); ++i) {
        const std::size_t micro_step = i / 6;
        joined[(micro_step * static_cast<std::size_t>(dp_size) + static_cast<std::size_t>(dp_rank)) * 6 + i % 6] =
            own[i];
      }
    }
    EXPECT_EQ(joined, reference) << dp_size;
  }
}

TEST_F(LoaderTest, ResumingAnywhereGivesTheTail) {
  const std::vector<Row> reference = stream(settings(0, true), 0, 50);
  for (std::int64_t position = 0; position < 250; position += 17) {
    const std::vector<Row> tail = stream(settings(3, true), position, 5);
    EXPECT_TRUE(std::equal(tail.begin(), tail.end(), reference.begin() + position)) << position;
  }
}

TEST_F(LoaderTest, MasksChangeWithTheEpochAndNotWithTheBatch) {
  const std::vector<Row> rows = stream(settings(), 0, 40);
  EXPECT_NE(rows[0].positions == rows[kRows].positions && rows[1].positions == rows[kRows + 1].positions &&
                rows[2].positions == rows[kRows + 2].positions,
            true);
  LoaderSettings larger = settings();
  larger.micro_batch = 24;
  const std::vector<Row> again = stream(larger, 0, 10);
  EXPECT_TRUE(std::equal(again.begin(), again.end(), rows.begin()));
}

TEST_F(LoaderTest, HeldOutBatches) {
  ShardSet set = ShardSet::open(folder_.path(), "train");
  const MaskSettings masks{0, set.vocab_size(), set.seq_length(), 0.25};
  const Batch whole = make_batch(set, 0, 60, masks);
  std::vector<Row> parts = rows_of(make_batch(set, 0, 35, masks));
  for (Row& row : rows_of(make_batch(set, 35, 25, masks))) parts.push_back(std::move(row));
  EXPECT_EQ(rows_of(whole), parts);
}

TEST_F(LoaderTest, ADamagedShardStopsTheStreamBeforeItsFirstRow) {
  testing::flip_bit(folder_.path("train-00001.h5"),
                    8 * (std::filesystem::file_size(folder_.path("train-00001.h5")) - 100));
  for (const int prefetch : {0, 4}) {
    Loader loader(shards(), settings(prefetch), 0);
    for (int i = 0; i < 6; ++i) static_cast<void>(loader.next());  // rows 0..35 of the first shard's 40
    const Error error = error_of([&] { static_cast<void>(loader.next()); });
    EXPECT_EQ(error.code(), ExitCode::kData);
    EXPECT_NE(std::string(error.what()).find("train-00001.h5"), std::string::npos);
    EXPECT_THROW(static_cast<void>(loader.next()), Error) << "and stays stopped";
  }
}

TEST_F(LoaderTest, CanBeDroppedAtAnyTime) {
  for (int taken = 0; taken < 6; ++taken) {
    Loader loader(shards(), settings(2), 0);
    for (int i = 0; i < taken; ++i) static_cast<void>(loader.next());
  }
}

TEST_F(LoaderTest, ImpossibleSettingsAreRefused) {
  LoaderSettings s = settings();
  s.dp_rank = 1;
  EXPECT_THROW(Loader(shards(), s, 0), Error);
  s = settings();
  s.micro_batch = 0;
  EXPECT_THROW(Loader(shards(), s, 0), Error);
}

}  // namespace
}  // namespace cram
