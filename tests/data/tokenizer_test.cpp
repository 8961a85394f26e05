#include "data/tokenizer.h"

#include <gtest/gtest.h>

#include "base/rng.h"
#include "data/text.h"
#include "data/tokenizer_folder.h"
#include "data_support.h"

namespace cram {
namespace {

using testing::error_of;
using testing::repository_file;
using testing::TemporaryFolder;

std::string train(const std::vector<std::string>& texts, const TokenizerSettings& settings) {
  std::size_t next = 0;
  return train_tokenizer(
      [&](std::string& text) {
        if (next == texts.size()) return false;
        text = texts[next++];
        return true;
      },
      settings);
}

const std::string& demo_text() {
  static const std::string text = normalize(read_file(repository_file("data/demo/us_founding_documents.txt")));
  return text;
}

Tokenizer demo_tokenizer(const std::string& type = "bpe", std::int64_t vocab_size = 400) {
  return Tokenizer::from_bytes(train({demo_text()}, {vocab_size, type, false}), "test");
}

TEST(TokenizerTest, SpecialTokensComeFirst) {
  for (const char* type : {"bpe", "unigram"}) {
    const Tokenizer tokenizer = demo_tokenizer(type);
    EXPECT_EQ(tokenizer.type(), type);
    EXPECT_EQ(tokenizer.vocab_size(), 400);
    EXPECT_EQ(tokenizer.piece(kPadId), "[PAD]");
    EXPECT_EQ(tokenizer.piece(kUnkId), "[UNK]");
    EXPECT_EQ(tokenizer.piece(kClsId), "[CLS]");
    EXPECT_EQ(tokenizer.piece(kSepId), "[SEP]");
    EXPECT_EQ(tokenizer.piece(kMaskId), "[MASK]");
    EXPECT_THROW(static_cast<void>(tokenizer.piece(400)), Error);
  }
}

TEST(TokenizerTest, RoundTripIsTheNormalizedText) {
  for (const char* type : {"bpe", "unigram"}) {
    const Tokenizer tokenizer = demo_tokenizer(type);
    for (const char* text :
         {"We, the PEOPLE of the  United States", "a", "caf\xC3\xA9 \xE2\x80\x9Cquoted\xE2\x80\x9D", "``so''"}) {
      const std::string normalized = normalize(text);
      if (normalized.find('"') != std::string::npos) continue;  // not in this vocabulary
      EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), normalized) << text;
    }
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(demo_text())), demo_text()) << type;
    EXPECT_TRUE(tokenizer.encode("").empty());
    EXPECT_TRUE(tokenizer.encode(" \xE4\xB8\xAD ").empty());
  }
}

TEST(TokenizerTest, LongTextsAreSplitWithoutAnyoneNoticing) {
  // encode() cuts at spaces after 16,384 bytes; word by word must be the same, since no merge crosses a space.
  const Tokenizer tokenizer = demo_tokenizer();
  std::vector<std::uint32_t> by_word;
  std::size_t at = 0;
  while (at < demo_text().size()) {
    const std::size_t stop = std::min(demo_text().find(' ', at), demo_text().size());
    for (const std::uint32_t id : tokenizer.encode(demo_text().substr(at, stop - at))) by_word.push_back(id);
    at = stop + 1;
  }
  EXPECT_EQ(tokenizer.encode(demo_text()), by_word);
  CachingEncoder encoder(tokenizer);
  EXPECT_EQ(encoder.encode_normalized(demo_text()), by_word);
  EXPECT_EQ(encoder.encode_normalized(demo_text()), by_word) << "from memory";
  const Tokenizer unigram = demo_tokenizer("unigram");
  EXPECT_EQ(CachingEncoder(unigram).encode_normalized(demo_text()), unigram.encode(demo_text()));
  EXPECT_GT(demo_text().size(), 3U * 16384U);
}

TEST(TokenizerTest, SpecialNamesInTextAreText) {
  const Tokenizer tokenizer = Tokenizer::from_bytes(
      train({"we type [mask] and [sep] and [pad] and [cls] and [unk] a lot b, [mask] [mask] [sep]"}, {30, "bpe", true}),
      "test");
  for (const char* text : {"[MASK]", "a [MASK] b", "[PAD][CLS][SEP][UNK]", "[mask]"}) {
    for (const std::uint32_t id : tokenizer.encode(text)) EXPECT_GE(id, kSpecialTokens) << text;
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), normalize(text));
  }
  // What the vocabulary has no character for is [UNK], never another special id.
  for (const std::uint32_t id : tokenizer.encode("###")) EXPECT_TRUE(id == kUnkId || id >= kSpecialTokens);
}

TEST(TokenizerTest, TheSameTextGivesTheSameBytes) {
  for (const char* type : {"bpe", "unigram"}) {
    const TokenizerSettings settings{400, type, false};
    EXPECT_EQ(train({demo_text()}, settings), train({demo_text()}, settings)) << type;
  }
}

TEST(TokenizerTest, LargestAndSmallestVocabulary) {
  const std::vector<std::string> texts{"red fox blue dog"};
  const Error large = error_of([&] { train(texts, {30000, "bpe", false}); });
  EXPECT_EQ(large.code(), ExitCode::kUsage);
  EXPECT_NE(std::string(large.what()).find("30000"), std::string::npos);
  EXPECT_NE(std::string(large.what()).find("--soft-vocab"), std::string::npos);
  const std::int64_t largest = Tokenizer::from_bytes(train(texts, {30000, "bpe", true}), "test").vocab_size();
  EXPECT_NE(std::string(large.what()).find(concat("largest possible size is ", largest)), std::string::npos);
  EXPECT_EQ(Tokenizer::from_bytes(train(texts, {largest, "bpe", false}), "test").vocab_size(), largest);
  EXPECT_EQ(error_of([&] { train(texts, {largest + 1, "bpe", false}); }).code(), ExitCode::kUsage);

  const Error small = error_of([&] { train(texts, {10, "bpe", false}); });
  EXPECT_EQ(small.code(), ExitCode::kUsage);
  const std::int64_t smallest = kSpecialTokens + 11;  // r e d f o x b l u g and the blank
  EXPECT_NE(std::string(small.what()).find(concat("smallest possible size is ", smallest)), std::string::npos)
      << small.what();
  EXPECT_EQ(Tokenizer::from_bytes(train(texts, {smallest, "bpe", false}), "test").vocab_size(), smallest);
  EXPECT_EQ(error_of([&] { train(texts, {smallest - 1, "bpe", false}); }).code(), ExitCode::kUsage);
  EXPECT_EQ(error_of([&] { train({}, {100, "bpe", false}); }).code(), ExitCode::kData);
  EXPECT_EQ(error_of([&] { train(texts, {100, "word", false}); }).code(), ExitCode::kUsage);
}

TEST(TokenizerTest, LongSentencesAreLearnedFromToTheEnd) {
  // SentencePiece skips sentences over 4,192 bytes without a word: the rare word at the end must still be learned.
  std::string line;
  while (line.size() < 20000) line += "common words here ";
  for (int i = 0; i < 50; ++i) line += "zyzzyva ";
  const Tokenizer tokenizer = Tokenizer::from_bytes(train({line}, {200, "bpe", true}), "test");
  EXPECT_EQ(tokenizer.encode("zyzzyva").size(), 1U);
  // A word longer than the limit is cut, not dropped.
  const Tokenizer unbroken = Tokenizer::from_bytes(train({std::string(10000, 'q') + "w"}, {100, "bpe", true}), "test");
  EXPECT_EQ(unbroken.decode(unbroken.encode("qw")), "qw");
}

TEST(TokenizerTest, DigestIsOfTheContent) {
  const Tokenizer a = demo_tokenizer();
  EXPECT_EQ(a.digest(), demo_tokenizer().digest());
  EXPECT_NE(a.digest(), demo_tokenizer("bpe", 401).digest());
  EXPECT_NE(a.digest(), demo_tokenizer("unigram").digest());
}

class TokenizerFolderTest : public ::testing::Test {
 protected:
  [[nodiscard]] TokenizerFolderSettings settings(std::int64_t vocab_size = 300) const {
    TokenizerFolderSettings s;
    s.inputs = {repository_file("data/demo/us_founding_documents.txt")};
    s.output = folder_.path("t");
    s.tokenizer.vocab_size = vocab_size;
    return s;
  }
  TemporaryFolder folder_;
};

TEST_F(TokenizerFolderTest, LoadsWhatItMade) {
  make_tokenizer_folder(settings());
  const Tokenizer tokenizer = Tokenizer::load(folder_.path("t"));
  EXPECT_EQ(tokenizer.vocab_size(), 300);
  EXPECT_EQ(Tokenizer::load_file(folder_.path("t/tokenizer.model")).digest(), tokenizer.digest());
}

TEST_F(TokenizerFolderTest, ThreadsDoNotChangeTheBytes) {
  TokenizerFolderSettings many = settings();
  many.threads = 7;
  many.output = folder_.path("u");
  make_tokenizer_folder(settings());
  make_tokenizer_folder(many);
  EXPECT_EQ(read_file(folder_.path("t/tokenizer.model")), read_file(folder_.path("u/tokenizer.model")));
  EXPECT_EQ(read_file(folder_.path("t/manifest.json")), read_file(folder_.path("u/manifest.json")));
}

TEST_F(TokenizerFolderTest, ReusesReplacesAndRefuses) {
  make_tokenizer_folder(settings());
  const auto made = std::filesystem::last_write_time(folder_.path("t/tokenizer.model"));
  make_tokenizer_folder(settings());
  EXPECT_EQ(std::filesystem::last_write_time(folder_.path("t/tokenizer.model")), made) << "reused";
  const Error error = error_of([&] { make_tokenizer_folder(settings(350)); });
  EXPECT_EQ(error.code(), ExitCode::kUsage);
  EXPECT_NE(std::string(error.what()).find("vocab_size: 300 there, 350 asked for"), std::string::npos);
  EXPECT_EQ(Tokenizer::load(folder_.path("t")).vocab_size(), 300);
  TokenizerFolderSettings forced = settings(350);
  forced.force = true;
  make_tokenizer_folder(forced);
  EXPECT_EQ(Tokenizer::load(folder_.path("t")).vocab_size(), 350);
}

TEST_F(TokenizerFolderTest, DamageIsSeenBeforeTheModelIsParsed) {
  make_tokenizer_folder(settings());
  const std::string path = folder_.path("t/tokenizer.model");
  const std::uint64_t bits = std::filesystem::file_size(path) * 8;
  RandomStream stream(6);
  for (int i = 0; i < 200; ++i) {
    const std::uint64_t bit = stream.below(bits);
    testing::flip_bit(path, bit);
    EXPECT_EQ(error_of([&] { static_cast<void>(Tokenizer::load(folder_.path("t"))); }).code(), ExitCode::kData);
    testing::flip_bit(path, bit);
  }
  EXPECT_EQ(Tokenizer::load(folder_.path("t")).vocab_size(), 300);
  testing::flip_bit(path, 99);
  make_tokenizer_folder(settings());  // the same command mends it
  EXPECT_EQ(Tokenizer::load(folder_.path("t")).vocab_size(), 300);
}

TEST_F(TokenizerFolderTest, ForeignModelsAreRefused) {
  EXPECT_EQ(error_of([&] { static_cast<void>(Tokenizer::from_bytes("no model", "test")); }).code(), ExitCode::kData);
  EXPECT_EQ(error_of([&] { static_cast<void>(Tokenizer::from_bytes("", "test")); }).code(), ExitCode::kData);
}

}  // namespace
}  // namespace cram
