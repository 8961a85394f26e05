#include "data/pack.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "base/rng.h"
#include "data/block_order.h"
#include "data/inspect.h"
#include "data/shard_set.h"
#include "data/tokenizer_folder.h"
#include "data_support.h"

namespace cram {
namespace {

using testing::error_of;
using testing::repository_file;
using testing::TemporaryFolder;

IdVector ids_of(const std::vector<std::vector<std::uint32_t>>& blocks, std::int64_t vocab_size) {
  IdVector ids(vocab_size);
  for (const auto& block : blocks) {
    for (const std::uint32_t id : block) ids.push_back(id);
  }
  return ids;
}

// Id 5 stands for "." and 6 for "...".
const std::vector<std::vector<std::uint32_t>> kBlocks{
    {7, 7, 5, 3},  // 1 full stop, 1 sep
    {7, 6, 5, 8},  // 4 full stops
    {3, 7, 3, 8},  // 0 full stops, 2 seps
    {9, 3, 5, 7},  // 1 full stop, 1 sep
    {7, 7, 7, 7},
};
const BlockOrderContext kContext{4, 10, 1, {0, 0, 0, 0, 0, 1, 3, 0, 0, 0}};

TEST(BlockOrderTest, HandOracles) {
  const IdVector ids = ids_of(kBlocks, 10);
  using Order = std::vector<std::uint64_t>;
  EXPECT_EQ(order_blocks("none", ids, kContext), (Order{0, 1, 2, 3, 4}));
  EXPECT_EQ(order_blocks("sentence-length", ids, kContext), (Order{1, 0, 3, 2, 4}));
  EXPECT_EQ(order_blocks("fragment", ids, kContext), (Order{2, 0, 3, 1, 4}));
  // Counts of 20 tokens: 3 x4, 5 x3, 6 x1, 7 x9, 8 x2, 9 x1, so p·30 = 5, 4, 2, 10, 3, 2. The product of p·30 over each
  // block: 0: 10·10·4·5 = 2000; 1: 10·2·4·3 = 240; 2: 5·10·5·3 = 750; 3: 2·5·4·10 = 400; 4: 10000. Ascending:
  EXPECT_EQ(order_blocks("unigram", ids, kContext), (Order{1, 3, 2, 0, 4}));
  Order shuffled = order_blocks("randomized", ids, kContext);
  EXPECT_EQ(shuffled, order_blocks("randomized", ids, kContext));
  std::sort(shuffled.begin(), shuffled.end());
  EXPECT_EQ(shuffled, (Order{0, 1, 2, 3, 4}));
  EXPECT_EQ(error_of([&] { static_cast<void>(order_blocks("fragmnt", ids, kContext)); }).code(), ExitCode::kUsage);
}

TEST(BlockOrderTest, WideIdsOrderAlike) {
  BlockOrderContext wide = kContext;
  wide.vocab_size = 70000;
  wide.full_stops.resize(70000);
  const IdVector ids = ids_of(kBlocks, 70000);
  for (const char* name : {"sentence-length", "fragment", "randomized"}) {
    EXPECT_EQ(order_blocks(name, ids, wide), order_blocks(name, ids_of(kBlocks, 10), kContext)) << name;
  }
}

TEST(SplitTest, ALargerShareKeepsWhatASmallerOneHeldOut) {
  int small = 0;
  int large = 0;
  for (std::uint64_t i = 0; i < 100000; ++i) {
    const std::uint64_t hash = hash64(std::to_string(i));
    small += is_validation_document(hash, 0.01) ? 1 : 0;
    large += is_validation_document(hash, 0.08) ? 1 : 0;
    EXPECT_TRUE(!is_validation_document(hash, 0.01) || is_validation_document(hash, 0.08));
  }
  EXPECT_NEAR(small, 1000, 160);
  EXPECT_NEAR(large, 8000, 430);
}

class PackTest : public ::testing::Test {
 protected:
  static constexpr int kDocuments = 400;

  void SetUp() override {
    std::string text;
    for (int i = 0; i < kDocuments; ++i) text += document(i) + "\n\n";
    corpus_ = folder_.write("c.txt", text);
    TokenizerFolderSettings tokenizer;
    tokenizer.inputs = {corpus_};
    tokenizer.output = folder_.path("t");
    tokenizer.tokenizer.vocab_size = 200;
    make_tokenizer_folder(tokenizer);
  }

  static std::string document(int i) {
    std::string text;
    for (int word = 0; word <= i % 17; ++word) {
      text += "word" + std::to_string((i * 31 + word) % 211) + (word % 3 == i % 3 ? ". " : " ");
    }
    return text + "end " + std::to_string(i);
  }

  [[nodiscard]] PackSettings settings(const std::string& output = "s") const {
    PackSettings s;
    s.inputs = {corpus_};
    s.tokenizer = folder_.path("t");
    s.output = folder_.path(output);
    s.seq_length = 16;
    s.validation = 0.1;
    s.rows_per_shard = 100;
    return s;
  }

  [[nodiscard]] std::vector<std::uint32_t> tokens(const std::string& output, const std::string& split) const {
    ShardSet set = ShardSet::open(folder_.path(output), split);
    std::vector<std::uint32_t> ids(static_cast<std::size_t>(set.rows() * set.seq_length()));
    set.read_rows(0, set.rows(), ids.data());
    return ids;
  }

  /// The whole documents of a split in stream order; the torn last one is left out.
  [[nodiscard]] std::vector<std::string> documents(const std::string& output, const std::string& split) const {
    const Tokenizer tokenizer = Tokenizer::load(folder_.path("t"));
    std::vector<std::string> all;
    std::vector<std::uint32_t> present;
    for (const std::uint32_t id : tokens(output, split)) {
      if (id != kSepId) {
        present.push_back(id);
      } else {
        all.push_back(tokenizer.decode(present));
        present.clear();
      }
    }
    return all;
  }

  TemporaryFolder folder_;
  std::string corpus_;
};

TEST_F(PackTest, OrderNoneKeepsTheInput) {
  PackSettings s = settings();
  s.order = "none";
  pack(s);
  const std::vector<std::string> train = documents("s", "train");
  const std::vector<std::string> validation = documents("s", "validation");
  // Merging the two streams by the input must give the input, less at most one torn document a side.
  std::size_t t = 0;
  std::size_t v = 0;
  for (int i = 0; i < kDocuments; ++i) {
    if (t < train.size() && train[t] == document(i)) {
      ++t;
    } else if (v < validation.size() && validation[v] == document(i)) {
      ++v;
    } else {
      EXPECT_TRUE(t == train.size() || v == validation.size()) << i;
    }
  }
  EXPECT_EQ(t, train.size());
  EXPECT_EQ(v, validation.size());
  EXPECT_GE(t + v, static_cast<std::size_t>(kDocuments) - 6);
}

TEST_F(PackTest, NothingIsLostOrInvented) {
  pack(settings());
  const Manifest manifest = read_manifest(folder_.path("s"));
  EXPECT_GT(manifest.splits.at("train").shards.size(), 1U);
  std::int64_t kept = 0;
  std::int64_t dropped = 0;
  std::int64_t documents = 0;
  for (const auto& [name, split] : manifest.splits) {
    kept += split.rows * 16;
    dropped += split.dropped_tokens;
    documents += split.documents;
    EXPECT_LT(split.dropped_tokens, 16);
  }
  EXPECT_EQ(kept + dropped, manifest.counts.at("tokens"));
  EXPECT_EQ(documents, kDocuments);
  const Tokenizer tokenizer = Tokenizer::load(folder_.path("t"));
  std::int64_t expected = kDocuments;  // one separator each
  for (int i = 0; i < kDocuments; ++i) expected += static_cast<std::int64_t>(tokenizer.encode(document(i)).size());
  EXPECT_EQ(manifest.counts.at("tokens"), expected);
}

TEST_F(PackTest, EveryOrderHasTheRowsOfTheSameStream) {
  std::map<std::string, std::multiset<std::vector<std::uint32_t>>> rows;
  for (const std::string& order : block_order_names()) {
    PackSettings s = settings("s-" + order);
    s.order = order;
    pack(s);
    const std::vector<std::uint32_t> ids = tokens("s-" + order, "train");
    std::vector<std::vector<std::uint32_t>> blocks;
    for (std::size_t at = 0; at < ids.size(); at += 16) {
      blocks.emplace_back(ids.begin() + static_cast<std::ptrdiff_t>(at),
                          ids.begin() + static_cast<std::ptrdiff_t>(at) + 16);
    }
    rows[order].insert(blocks.begin(), blocks.end());
    EXPECT_EQ(ShardSet::open(s.output, "train").order(), order);
    // The curricula hold over the whole split, shard ends included.
    const Tokenizer tokenizer = Tokenizer::load(folder_.path("t"));
    const auto full_stops = [&](const std::vector<std::uint32_t>& block) {
      const std::string text = tokenizer.decode(block);
      return std::count(text.begin(), text.end(), '.');
    };
    const auto separators = [](const std::vector<std::uint32_t>& block) {
      return std::count(block.begin(), block.end(), kSepId);
    };
    for (std::size_t i = 1; i < blocks.size(); ++i) {
      if (order == "sentence-length") {
        EXPECT_GE(full_stops(blocks[i - 1]), full_stops(blocks[i])) << i;
      }
      if (order == "fragment") {
        EXPECT_GE(separators(blocks[i - 1]), separators(blocks[i])) << i;
      }
    }
  }
  EXPECT_EQ(rows["randomized"], rows["sentence-length"]);
  EXPECT_EQ(rows["randomized"], rows["unigram"]);
  EXPECT_EQ(rows["randomized"], rows["fragment"]);
  EXPECT_NE(rows["randomized"], rows["none"]) << "other documents follow each other";
}

TEST_F(PackTest, TheSameCommandGivesTheSameBytes) {
  pack(settings("a"));
  PackSettings again = settings("b");
  again.threads = 5;
  pack(again);
  for (const auto& entry : std::filesystem::directory_iterator(folder_.path("a"))) {
    const std::string name = entry.path().filename().string();
    EXPECT_EQ(read_file(entry.path()), read_file(folder_.path("b/" + name))) << name;
  }
  PackSettings other = settings("c");
  other.seed = 1;
  pack(other);
  EXPECT_NE(tokens("a", "train"), tokens("c", "train"));
}

TEST_F(PackTest, TheSplitDoesNotDependOnSeedOrderOrCompany) {
  pack(settings("a"));
  PackSettings other = settings("b");
  other.seed = 99;
  other.order = "unigram";
  folder_.write("more.txt", "another document of some length that was not there before\n\nand one more for company\n");
  other.inputs.insert(other.inputs.begin(), folder_.path("more.txt"));
  pack(other);
  const std::vector<std::string> first = documents("a", "validation");
  const std::vector<std::string> second = documents("b", "validation");
  const std::set<std::string> a(first.begin(), first.end());
  const std::set<std::string> b(second.begin(), second.end());
  std::size_t common = 0;
  for (const std::string& text : a) common += b.contains(text) ? 1U : 0U;
  EXPECT_GE(common + 2, a.size()) << "at most the torn ends differ";
  EXPECT_GT(a.size(), 20U);
}

TEST_F(PackTest, TheOrderOfFilesDoesNotMatter) {
  const std::string one = folder_.write("one.txt", document(1) + "\n\n" + document(2));
  PackSettings a = settings("a");
  a.inputs = {corpus_, one};
  PackSettings b = settings("b");
  b.inputs = {one, corpus_};
  pack(a);
  pack(b);
  EXPECT_EQ(tokens("a", "train"), tokens("b", "train"));
  EXPECT_EQ(tokens("a", "validation"), tokens("b", "validation"));
}

TEST_F(PackTest, TooLittleTextIsRefusedWithAShareThatFits) {
  PackSettings s = settings();
  s.inputs = {folder_.write("short.txt", "one short line\n")};
  s.seq_length = 128;
  const Error error = error_of([&] { pack(s); });
  EXPECT_EQ(error.code(), ExitCode::kData);
  EXPECT_NE(std::string(error.what()).find("needs at least 128"), std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(s.output));

  PackSettings tiny = settings();
  tiny.validation = 1e-7;
  const std::string message = error_of([&] { pack(tiny); }).what();
  const std::string marker = "--validation ";
  const std::size_t at = message.rfind(marker);
  ASSERT_NE(at, std::string::npos) << message;
  tiny.validation = std::stod(message.substr(at + marker.size()));
  pack(tiny);
  PackSettings greedy = settings("g");
  greedy.validation = 0.9999999;
  EXPECT_EQ(error_of([&] { pack(greedy); }).code(), ExitCode::kData);
  EXPECT_FALSE(std::filesystem::exists(greedy.output));
}

TEST_F(PackTest, TheFilterCountsTokensAgainstCharacters) {
  const std::string good = "word1 word2 word3 word4 word5 word1 word2 word3";
  const std::string trash = "x9 q8 z7 j6 k5 v4 x3 q2 z1";
  const Tokenizer tokenizer = Tokenizer::load(folder_.path("t"));
  const auto ratio = [&](const std::string& text) {
    return static_cast<double>(tokenizer.encode(text).size()) / static_cast<double>(text.size());
  };
  ASSERT_LT(ratio(good), ratio(trash));
  std::string text;
  for (int i = 0; i < 200; ++i) text += (i % 2 == 0 ? good : trash) + "\n\n";
  // Documents that are equal share a side of the split, so the corpus gives the sides.
  PackSettings s = settings();
  s.inputs = {corpus_, folder_.write("mixed.txt", text)};
  s.filter = (ratio(good) + ratio(trash)) / 2;
  pack(s);
  const Manifest manifest = read_manifest(s.output);
  EXPECT_GE(manifest.counts.at("filtered_documents"), 100);
  EXPECT_EQ(manifest.counts.at("filtered_documents") + manifest.counts.at("documents"), kDocuments + 200);
  for (const char* split : {"train", "validation"}) {
    for (const std::string& kept : documents("s", split)) EXPECT_NE(kept, trash);
  }
}

TEST_F(PackTest, ReusesRefusesAndReplaces) {
  pack(settings());
  const std::string shard = folder_.path("s/train-00000.h5");
  const auto made = std::filesystem::last_write_time(shard);
  pack(settings());
  EXPECT_EQ(std::filesystem::last_write_time(shard), made);
  PackSettings other = settings();
  other.seq_length = 32;
  const Error error = error_of([&] { pack(other); });
  EXPECT_EQ(error.code(), ExitCode::kUsage);
  EXPECT_NE(std::string(error.what()).find("seq_length: 16 there, 32 asked for"), std::string::npos);
  other.force = true;
  pack(other);
  verify_folder(other.output);
  EXPECT_EQ(ShardSet::open(other.output, "train").seq_length(), 32);
  PackSettings onto_tokenizer = settings("t");
  onto_tokenizer.force = true;
  EXPECT_EQ(error_of([&] { pack(onto_tokenizer); }).code(), ExitCode::kUsage) << "a tokenizer folder is not given up";
  EXPECT_EQ(Tokenizer::load(folder_.path("t")).vocab_size(), 200);
}

TEST_F(PackTest, LeftoversOfACrashGoAway) {
  pack(settings("whole"));
  // A crash before the manifest: some shards of another preparation, one half written.
  folder_.write("s/train-00000.h5", "half");
  folder_.write("s/train-00099.h5", "old");
  folder_.write("s/train-00001.h5.tmp-123-4-0", "torn");
  folder_.write("s/notes.txt", "mine");
  EXPECT_EQ(error_of([&] { static_cast<void>(ShardSet::open(folder_.path("s"), "train")); }).code(), ExitCode::kData);
  pack(settings());
  verify_folder(folder_.path("s"));
  EXPECT_EQ(read_file(folder_.path("s/train-00000.h5")), read_file(folder_.path("whole/train-00000.h5")));
  EXPECT_FALSE(std::filesystem::exists(folder_.path("s/train-00099.h5")));
  EXPECT_FALSE(std::filesystem::exists(folder_.path("s/train-00001.h5.tmp-123-4-0")));
  EXPECT_TRUE(std::filesystem::exists(folder_.path("s/notes.txt")));
}

TEST_F(PackTest, VerifySeesEveryKindOfDamage) {
  pack(settings());
  verify_folder(folder_.path("s"));
  RandomStream stream(8);
  for (const auto& entry : std::filesystem::directory_iterator(folder_.path("s"))) {
    for (int i = 0; i < 10; ++i) {
      const std::uint64_t bit = stream.below(entry.file_size() * 8);
      testing::flip_bit(entry.path().string(), bit);
      EXPECT_EQ(error_of([&] { verify_folder(folder_.path("s")); }).code(), ExitCode::kData)
          << entry.path() << " " << bit;
      testing::flip_bit(entry.path().string(), bit);
    }
  }
  verify_folder(folder_.path("s"));
  // The same command mends a damaged folder without --force.
  testing::flip_bit(folder_.path("s/train-00000.h5"), 5000);
  pack(settings());
  verify_folder(folder_.path("s"));
}

TEST_F(PackTest, ImpossibleSettingsAreRefused) {
  const auto code = [&](void (*change)(PackSettings&)) {
    PackSettings s = settings("never");
    change(s);
    return error_of([&] { pack(s); }).code();
  };
  EXPECT_EQ(code([](PackSettings& s) { s.seq_length = 0; }), ExitCode::kUsage);
  EXPECT_EQ(code([](PackSettings& s) { s.validation = 0; }), ExitCode::kUsage);
  EXPECT_EQ(code([](PackSettings& s) { s.validation = 1; }), ExitCode::kUsage);
  EXPECT_EQ(code([](PackSettings& s) { s.filter = -1; }), ExitCode::kUsage);
  EXPECT_EQ(code([](PackSettings& s) { s.order = "sorted"; }), ExitCode::kUsage);
  EXPECT_EQ(code([](PackSettings& s) { s.rows_per_shard = 0; }), ExitCode::kUsage);
  EXPECT_EQ(code([](PackSettings& s) { s.tokenizer = "/nonexistent"; }), ExitCode::kData);
  EXPECT_FALSE(std::filesystem::exists(folder_.path("never")));
}

}  // namespace
}  // namespace cram
