// One rank of a tensor group reads, each shard is opened once in the job, and every rank gets what it would have read.
#include "train/shared_rows.h"

#include <gtest/gtest.h>
#include <sys/inotify.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>

#include "data/data_support.h"
#include "parallel/agreement.h"
#include "support/thread_ranks.h"

namespace cram::test {
namespace {

// How often files of a folder were opened since it was made.
class OpenCounter {
 public:
  explicit OpenCounter(const std::string& folder) : fd_(::inotify_init1(IN_NONBLOCK)) {
    EXPECT_GE(::inotify_add_watch(fd_, folder.c_str(), IN_OPEN), 0);
  }
  ~OpenCounter() { ::close(fd_); }
  std::map<std::string, int> shards() {
    std::map<std::string, int> opened;
    alignas(inotify_event) char buffer[1 << 16];
    for (ssize_t bytes; (bytes = ::read(fd_, buffer, sizeof buffer)) > 0;) {
      for (const char* at = buffer; at < buffer + bytes;) {
        inotify_event event;
        std::memcpy(&event, at, sizeof event);
        const std::string name = event.len > 0 ? at + sizeof event : "";
        if (name.ends_with(".h5")) ++opened[name];
        at += sizeof event + event.len;
      }
    }
    return opened;
  }

 private:
  int fd_;
};

SharedCheck shared_by(Communicator& world) {
  return {world.rank(), world.size(), [&world](const std::string& own) {
            std::string all;
            for (const std::string& text : gather_text_to_root(world, own)) all += text;
            return broadcast_text(world, all);
          }};
}

TEST(SharedRows, AThousandShardsAreOpenedOnceByEightRanks) {
  const testing::TemporaryFolder folder;
  testing::write_prepared(folder.path("s"), testing::counting_rows(990, 8, 50), testing::counting_rows(10, 8, 50),
                          {.rows_per_shard = 1});
  OpenCounter counter(folder.path("s"));
  std::mutex one_at_a_time;  // the ranks are threads here, and HDF5 may not know threads
  const auto messages = run_ranks(8, [&](Communicator& world) {
    SharedCheck check = shared_by(world);
    const auto exchange = check.exchange;
    // Each rank's own check comes before the exchange, under the lock.
    std::unique_lock lock(one_at_a_time);
    check.exchange = [&](const std::string& own) {
      lock.unlock();
      return exchange(own);
    };
    const PreparedShards both = open_prepared(folder.path("s"), {}, check);
    EXPECT_EQ(both.train.rows(), 990);
    EXPECT_EQ(both.validation.rows(), 10);
  });
  EXPECT_EQ(messages, std::vector<std::string>(8));
  const std::map<std::string, int> opened = counter.shards();
  EXPECT_EQ(opened.size(), 1000U);
  for (const auto& [name, times] : opened) EXPECT_EQ(times, 1) << name;
}

TEST(SharedRows, DamageThatOneRankFindsIsKnownToAll) {
  const testing::TemporaryFolder folder;
  testing::write_prepared(folder.path("s"), testing::counting_rows(6, 8, 50), testing::counting_rows(2, 8, 50),
                          {.rows_per_shard = 1});
  std::filesystem::resize_file(folder.path("s/train-00002.h5"), 100);
  std::mutex one_at_a_time;
  const auto open_all = [&](const ShardSetOptions& options, std::vector<std::int64_t>& rows) {
    return run_ranks(4, [&](Communicator& world) {
      SharedCheck check = shared_by(world);
      const auto exchange = check.exchange;
      std::unique_lock lock(one_at_a_time);
      check.exchange = [&](const std::string& own) {
        lock.unlock();
        return exchange(own);
      };
      rows[static_cast<std::size_t>(world.rank())] = open_prepared(folder.path("s"), options, check).train.rows();
    });
  };
  std::vector<std::int64_t> rows(4);
  for (const std::string& message : open_all({}, rows)) {
    EXPECT_NE(message.find("train-00002.h5 has 100 bytes"), std::string::npos) << message;
  }
  EXPECT_EQ(open_all({.skip_bad_shards = true}, rows), std::vector<std::string>(4));
  EXPECT_EQ(rows, std::vector<std::int64_t>(4, 5));
}

TEST(SharedRows, EveryRankOfATensorGroupGetsTheBatchesOfOneReader) {
  const testing::TemporaryFolder folder;
  testing::write_prepared(folder.path("s"), testing::counting_rows(24, 8, 50), testing::counting_rows(4, 8, 50));
  LoaderSettings settings;
  settings.micro_batch = 4;
  settings.seed = 7;
  settings.shuffle = true;
  settings.prefetch = 0;
  const auto open = [&] { return std::make_shared<ShardSet>(ShardSet::open(folder.path("s"), "train")); };
  std::vector<Batch> expected;
  Loader alone(open(), settings, 3);
  for (int i = 0; i < 8; ++i) expected.push_back(alone.next());
  const std::shared_ptr<ShardSet> shards[] = {open(), open(), open(), open(), open(), open()};
  // 2 tensor ranks on each of 3 stages: 0 and 1, 2 and 3 (between the others), 4 and 5.
  std::vector<double> sent(6);
  const auto messages = run_ranks(6, [&](Communicator& world) {
    const Mesh mesh(world, Layout{.tensor = 2, .pipeline = 3});
    const auto rank = static_cast<std::size_t>(world.rank());
    const std::unique_ptr<BatchSource> source = open_rows(shards[rank], settings, 3, mesh);
    mesh.tensor_host().trace().reset_bytes();
    for (const Batch& batch : expected) {
      const Batch own = source->next();
      EXPECT_EQ(own.rows, 4);
      EXPECT_EQ(own.seq_length, 8);
      const bool between = !mesh.is_first_stage() && !mesh.is_last_stage();
      EXPECT_EQ(own.fields().size(), between ? 0U : 3U);
      if (between) continue;
      for (const Batch::Field& field : batch.fields()) EXPECT_TRUE(own[field.name].equal(field.tensor)) << field.name;
    }
    sent[rank] = mesh.tensor_host().trace().total_bytes();
  });
  EXPECT_EQ(messages, std::vector<std::string>(6));
  const double told = 8 * 4 * 8 * 4;  // batches x rows x tokens x bytes
  EXPECT_EQ(sent, (std::vector<double>{told, 0, 0, 0, told, 0}));
}

}  // namespace
}  // namespace cram::test
