#include "data/shard.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <unistd.h>

#include <cmath>

#include "base/rng.h"
#include "data/shard_set.h"
#include "data_support.h"

#ifdef __SANITIZE_ADDRESS__
// HDF5 1.10.8 forgets 64 bytes of its own when it refuses some damaged files.
extern "C" const char* __lsan_default_suppressions() { return "leak:libhdf5_serial\n"; }
#endif

namespace cram {
namespace {

namespace fs = std::filesystem;
using testing::counting_rows;
using testing::error_of;
using testing::fill_from;
using testing::flip_bit;
using testing::Rows;
using testing::TemporaryFolder;
using testing::write_prepared;

ShardHeader header_for(const Rows& rows, std::int64_t seq_length, std::int64_t vocab_size) {
  return {seq_length, vocab_size, static_cast<std::int64_t>(rows.size()), 3, "train", "unigram", digest_text("t")};
}

std::vector<std::uint32_t> flat(const Rows& rows) {
  std::vector<std::uint32_t> all;
  for (const auto& row : rows) all.insert(all.end(), row.begin(), row.end());
  return all;
}

TEST(ShardTest, AsManyRowsComeBackAsWereWritten) {
  const TemporaryFolder folder;
  for (const std::int64_t count : {0, 1, 511, 512, 513, 1025}) {
    const Rows rows = counting_rows(count, 16, 60000);
    const std::string path = folder.path("s.h5");
    const ShardFile file = write_shard(path, header_for(rows, 16, 60000), fill_from(rows));
    EXPECT_EQ(file.rows, count);
    EXPECT_EQ(file.bytes, static_cast<std::int64_t>(fs::file_size(path)));
    EXPECT_EQ(file.digest, digest_file(path));
    const ShardReader reader = ShardReader::open(path);
    EXPECT_EQ(reader.header(), header_for(rows, 16, 60000));
    std::vector<std::uint32_t> read(static_cast<std::size_t>(count * 16));
    reader.read(0, count, read.data());
    EXPECT_EQ(read, flat(rows)) << count;
    if (count > 1) {
      std::vector<std::uint32_t> last(16);
      reader.read(count - 1, 1, last.data());
      EXPECT_EQ(last, rows.back());
    }
    EXPECT_THROW(reader.read(count, 1, read.data()), Error);
    EXPECT_THROW(reader.read(-1, 1, read.data()), Error);
  }
}

TEST(ShardTest, TheSameRowsGiveTheSameBytes) {
  const TemporaryFolder folder;
  const Rows rows = counting_rows(700, 16, 60000);
  const ShardFile a = write_shard(folder.path("a.h5"), header_for(rows, 16, 60000), fill_from(rows));
  ::sleep(1);  // HDF5 stores seconds where it stores times
  const ShardFile b = write_shard(folder.path("b.h5"), header_for(rows, 16, 60000), fill_from(rows));
  EXPECT_EQ(a.digest, b.digest);
}

TEST(ShardTest, WideIdsAboveSixteenBits) {
  const TemporaryFolder folder;
  for (const std::int64_t vocab_size : {65536, 65537, 100000}) {
    const auto top = static_cast<std::uint32_t>(vocab_size - 1);
    const Rows rows{{top, 5}, {0, 65535}};
    const std::string path = folder.path(std::to_string(vocab_size) + ".h5");
    write_shard(path, header_for(rows, 2, vocab_size), fill_from(rows));
    std::vector<std::uint32_t> read(4);
    ShardReader::open(path).read(0, 2, read.data());
    EXPECT_EQ(read, flat(rows)) << vocab_size;
  }
}

TEST(ShardTest, AnIdOutsideTheVocabularyIsNeverWritten) {
  const TemporaryFolder folder;
  const Rows rows{{5, 50}};
  EXPECT_EQ(error_of([&] { write_shard(folder.path("s.h5"), header_for(rows, 2, 50), fill_from(rows)); }).code(),
            ExitCode::kData);
  EXPECT_TRUE(fs::is_empty(folder.path())) << "nothing is left of a failed write";
}

TEST(ShardTest, AFailedWriteLeavesAnOlderShardAlone) {
  const TemporaryFolder folder;
  const Rows rows = counting_rows(10, 4, 50);
  const std::string path = folder.path("s.h5");
  const ShardFile file = write_shard(path, header_for(rows, 4, 50), fill_from(rows));
  EXPECT_THROW(write_shard(path, header_for(rows, 4, 50),
                           [](std::int64_t, std::int64_t, std::uint32_t*) { fail(ExitCode::kData, "no more text"); }),
               Error);
  EXPECT_EQ(digest_file(path), file.digest);
}

TEST(ShardTest, OtherFilesAreRefused) {
  const TemporaryFolder folder;
  EXPECT_EQ(error_of([&] { static_cast<void>(ShardReader::open(folder.path("none.h5"))); }).code(), ExitCode::kData);
  EXPECT_EQ(error_of([&] { static_cast<void>(ShardReader::open(folder.write("text.h5", "text"))); }).code(),
            ExitCode::kData);
}

class ShardSetTest : public ::testing::Test {
 protected:
  static constexpr std::int64_t kTrainRows = 1500;  // shards of 700, 700 and 100 rows
  void SetUp() override { write_prepared(folder_.path(), train_, validation_); }
  [[nodiscard]] std::string shard(int index) const {
    return folder_.path("train-0000" + std::to_string(index) + ".h5");
  }

  /// The code of opening and of reading everything; kOk when all is well.
  [[nodiscard]] ExitCode read_everything(const ShardSetOptions& options = {}) const {
    try {
      ShardSet set = ShardSet::open(folder_.path(), "train", options);
      std::vector<std::uint32_t> ids(static_cast<std::size_t>(set.rows() * set.seq_length()));
      set.read_rows(0, set.rows(), ids.data());
      EXPECT_EQ(ids, flat(train_)) << "damage went unseen";
      return ExitCode::kOk;
    } catch (const Error& error) {
      return error.code();
    }
  }

  TemporaryFolder folder_;
  const Rows train_ = counting_rows(kTrainRows, 8, 50);
  const Rows validation_ = counting_rows(20, 8, 50);
};

TEST_F(ShardSetTest, IsOneTableOfAllRows) {
  ShardSet set = ShardSet::open(folder_.path(), "train");
  EXPECT_EQ(set.rows(), kTrainRows);
  EXPECT_EQ(set.seq_length(), 8);
  EXPECT_EQ(set.vocab_size(), 50);
  EXPECT_EQ(set.order(), "none");
  EXPECT_EQ(set.tokenizer_digest(), digest_text("vocabulary"));
  EXPECT_EQ(read_everything(), ExitCode::kOk);
  RandomStream stream(1);
  for (int i = 0; i < 200; ++i) {
    const auto first = static_cast<std::int64_t>(stream.below(kTrainRows));
    const auto count = static_cast<std::int64_t>(
                           stream.below(static_cast<std::uint64_t>(std::min<std::int64_t>(900, kTrainRows - first)))) +
                       1;
    std::vector<std::uint32_t> ids(static_cast<std::size_t>(count * 8));
    set.read_rows(first, count, ids.data());
    const Rows expected(train_.begin() + first, train_.begin() + first + count);
    ASSERT_EQ(ids, flat(expected)) << first << " " << count;
  }
  std::uint32_t ids[8];
  EXPECT_THROW(set.read_rows(kTrainRows, 1, ids), Error);
  EXPECT_THROW(set.read_rows(-1, 1, ids), Error);
  EXPECT_NE(set.digest(), ShardSet::open(folder_.path(), "validation").digest());
  EXPECT_EQ(set.digest(), ShardSet::open(folder_.path(), "train").digest());
}

TEST_F(ShardSetTest, AFlippedBitIsSeenBeforeUse) {
  RandomStream stream(2);
  const std::string path = shard(1);
  const std::uint64_t bits = fs::file_size(path) * 8;
  for (int i = 0; i < 100; ++i) {
    const std::uint64_t bit = stream.below(bits);
    flip_bit(path, bit);
    EXPECT_EQ(read_everything(), ExitCode::kData) << "bit " << bit;
    EXPECT_EQ(read_everything({.verify_all = true}), ExitCode::kData) << "bit " << bit;
    flip_bit(path, bit);
  }
  EXPECT_EQ(read_everything(), ExitCode::kOk) << "the flips were undone";
}

TEST_F(ShardSetTest, TheDigestIsCheckedBeforeTheFirstRowIsUsed) {
  flip_bit(shard(2), fs::file_size(shard(2)) * 8 - 9);
  ShardSet set = ShardSet::open(folder_.path(), "train");  // sizes and headers are still right
  std::vector<std::uint32_t> ids(8, 12345);
  set.read_rows(1399, 1, ids.data());  // the other shards work
  const std::vector<std::uint32_t> before = ids;
  const Error error = error_of([&] { set.read_rows(1400, 1, ids.data()); });
  EXPECT_EQ(error.code(), ExitCode::kData);
  EXPECT_NE(std::string(error.what()).find("train-00002.h5"), std::string::npos);
  EXPECT_EQ(ids, before);
}

TEST_F(ShardSetTest, Truncations) {
  const std::string whole = read_file(shard(1));
  RandomStream stream(3);
  for (int i = 0; i < 40; ++i) {
    std::ofstream(shard(1), std::ios::binary | std::ios::trunc) << whole.substr(0, stream.below(whole.size()));
    EXPECT_EQ(read_everything(), ExitCode::kData);
  }
}

TEST_F(ShardSetTest, MissingExtraAndSwappedShards) {
  fs::rename(shard(1), folder_.path("away"));
  const Error missing = error_of([&] { static_cast<void>(ShardSet::open(folder_.path(), "train")); });
  EXPECT_EQ(missing.code(), ExitCode::kData);
  EXPECT_NE(std::string(missing.what()).find("train-00001.h5 is missing"), std::string::npos) << missing.what();
  fs::rename(folder_.path("away"), shard(1));
  EXPECT_EQ(read_everything(), ExitCode::kOk);

  fs::copy_file(shard(1), shard(3));
  EXPECT_NE(std::string(error_of([&] { static_cast<void>(ShardSet::open(folder_.path(), "train")); }).what())
                .find("train-00003.h5 is not in the manifest"),
            std::string::npos);
  fs::remove(shard(3));

  fs::rename(shard(0), folder_.path("away"));
  fs::rename(shard(1), shard(0));
  fs::rename(folder_.path("away"), shard(1));
  EXPECT_EQ(read_everything(), ExitCode::kData) << "two whole shards of one size in each other's place";
}

TEST_F(ShardSetTest, ShardsOfOtherDataAreRefusedAtTheStart) {
  const std::string whole = read_file(shard(2));
  const ShardHeader right{8, 50, 100, 2, "train", "none", digest_text("vocabulary")};
  std::vector<ShardHeader> wrong(5, right);
  wrong[0].seq_length = 16;
  wrong[1].tokenizer_digest = digest_text("another");
  wrong[2].vocab_size = 60;
  wrong[3].split = "validation";
  wrong[4].rows = 99;
  const Rows rows = counting_rows(100, 16, 50);
  for (const ShardHeader& header : wrong) {
    fs::remove(shard(2));
    const ShardFile file =
        write_shard(shard(2), header, [&](std::int64_t first, std::int64_t count, std::uint32_t* out) {
          for (std::int64_t i = 0; i < count; ++i)
            out = std::copy_n(rows[static_cast<std::size_t>(first + i)].begin(), header.seq_length, out);
        });
    // As a wrong preparation would have it: the manifest knows the file, its header differs.
    Manifest manifest = read_manifest(folder_.path());
    manifest.splits["train"].shards[2] = file;
    manifest.splits["train"].rows = 1400 + file.rows;
    if (header.rows == 99) manifest.splits["train"].shards[2].rows = 100, manifest.splits["train"].rows = 1500;
    write_manifest(folder_.path(), manifest);
    const Error error = error_of([&] { static_cast<void>(ShardSet::open(folder_.path(), "train")); });
    EXPECT_EQ(error.code(), ExitCode::kData);
    EXPECT_NE(std::string(error.what()).find("is of other data"), std::string::npos) << error.what();
  }
}

TEST_F(ShardSetTest, AnEditedManifestIsRefused) {
  const std::string path = folder_.path(kManifestName);
  const std::string whole = read_file(path);
  RandomStream stream(4);
  for (int i = 0; i < 300; ++i) {
    const std::uint64_t bit = stream.below(whole.size() * 8);
    flip_bit(path, bit);
    EXPECT_EQ(read_everything(), ExitCode::kData) << "bit " << bit;
    flip_bit(path, bit);
  }
  for (std::size_t size = 0; size < whole.size(); size += 37) {
    std::ofstream(path, std::ios::binary | std::ios::trunc) << whole.substr(0, size);
    EXPECT_EQ(read_everything(), ExitCode::kData) << size;
  }
  std::ofstream(path, std::ios::binary | std::ios::trunc) << std::string(2000000, '[');
  EXPECT_EQ(read_everything(), ExitCode::kData);
  fs::remove(path);
  EXPECT_EQ(read_everything(), ExitCode::kData);
}

TEST_F(ShardSetTest, AnotherTokenizerInTheFolderIsRefused) {
  folder_.write(kTokenizerFileName, "another model");
  EXPECT_EQ(read_everything(), ExitCode::kData);
}

TEST_F(ShardSetTest, BadShardsCanBeLeftOut) {
  flip_bit(shard(1), 8 * 4000);
  ShardSet set = ShardSet::open(folder_.path(), "train", {.skip_bad_shards = true});
  EXPECT_EQ(set.rows(), 800);
  std::vector<std::uint32_t> ids(8);
  set.read_rows(700, 1, ids.data());
  EXPECT_EQ(ids, train_[1400]);
  EXPECT_NE(set.digest(), "");
}

TEST_F(ShardSetTest, ReadersNeedNoLockAndNoWritePermission) {
  std::vector<int> locks;
  for (const auto& entry : fs::directory_iterator(folder_.path())) {
    const int fd = ::open(entry.path().c_str(), O_RDONLY);
    ASSERT_EQ(::flock(fd, LOCK_EX | LOCK_NB), 0);
    locks.push_back(fd);
  }
  fs::permissions(folder_.path(), fs::perms::owner_read | fs::perms::owner_exec);
  EXPECT_EQ(read_everything(), ExitCode::kOk);
  ShardSet one = ShardSet::open(folder_.path(), "train");
  ShardSet two = ShardSet::open(folder_.path(), "train");
  std::vector<std::uint32_t> ids(8);
  one.read_rows(0, 1, ids.data());
  two.read_rows(0, 1, ids.data());
  for (const int fd : locks) ::close(fd);
}

TEST_F(ShardSetTest, UnknownSplitAndForeignFolder) {
  EXPECT_EQ(error_of([&] { static_cast<void>(ShardSet::open(folder_.path(), "test")); }).code(), ExitCode::kData);
  EXPECT_EQ(error_of([&] { static_cast<void>(ShardSet::open("/nonexistent", "train")); }).code(), ExitCode::kData);
}

TEST(UnigramLossTest, ByHand) {
  const TemporaryFolder folder;
  // Train: 5 five times, 6 once, 3 twice. V = 8, so p(5) = 6/16, p(6) = 2/16, p(3) = 3/16, p(7) = 1/16.
  write_prepared(folder.path(), {{5, 5, 5, 3}, {5, 5, 6, 3}}, {{5, 6, 7, 3}}, {4, 8, 100});
  ShardSet train = ShardSet::open(folder.path(), "train");
  ShardSet validation = ShardSet::open(folder.path(), "validation");
  const double expected = -(std::log(6.0 / 16) + std::log(2.0 / 16) + std::log(1.0 / 16) + std::log(3.0 / 16)) / 4;
  EXPECT_NEAR(unigram_loss(train, validation), expected, 1e-12);
}

}  // namespace
}  // namespace cram
