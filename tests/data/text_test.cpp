#include "data/text.h"

#include <gtest/gtest.h>

#include "data_support.h"

namespace cram {
namespace {

struct Step {
  const char* name;
  const char* text;
  const char* expected;
};

TEST(NormalizeTest, EveryStep) {
  const Step steps[] = {
      {"1 quotes", "``a'' `b' ```", "\"a\" `b' \"`"},
      {"1 before 2: a decomposed backtick is not doubled", "\xE1\xBF\xAF\xE1\xBF\xAF", "``"},
      {"2 and 4 accents", "Caf\xC3\xA9 na\xC3\xAFve \xC3\x85ngstr\xC3\xB6m", "cafe naive angstrom"},
      {"2 composed and decomposed are the same", "e\xCC\x81", "e"},
      {"2 singleton: kelvin sign", "\xE2\x84\xAA", "k"},
      {"2 does not use compatibility: ligature fi is dropped", "\xEF\xAC\x81x", "x"},
      {"3 lower", "ABC xyz \xC4\xB0", "abc xyz i"},
      {"5 non-ASCII",
       "a\xE2\x80\x94"
       "b \xE4\xB8\xAD\xE6\x96\x87 c",
       "ab c"},
      {"5 before 6: a no-break space is dropped",
       "a\xC2\xA0"
       "b",
       "ab"},
      {"6 white space", "a\tb\nc\vd\fe\rf", "a b c d e f"},
      {"7 control",
       "a\x01\x1F\x7F"
       "b",
       "ab"},
      {"7 is not 6: separators in between do not become spaces",
       "a\x1C"
       "b",
       "ab"},
      {"8 strip", "  a  ", "a"},
      {"9 runs", "a   b \t c", "a b c"},
      {"a dropped character between spaces leaves one", "a \xE4\xB8\xAD b", "a b"},
      {"invalid UTF-8 is dropped", "bad \xFF\xFE bytes\xE6\x96", "bad bytes"},
      {"byte order mark", "\xEF\xBB\xBFx", "x"},
      {"nothing left", " \xE4\xB8\xAD \x01 ", ""},
  };
  for (const Step& step : steps) EXPECT_EQ(normalize(step.text), step.expected) << step.name;
  EXPECT_EQ(normalize(std::string_view("nul \0 inside", 12)), "nul inside");
}

TEST(NormalizeTest, IsIdempotentOnRealAndHostileText) {
  std::vector<std::string> files{testing::repository_file("data/demo/us_founding_documents.txt"),
                                 testing::repository_file("data/demo/sotu_1790_1929_00.txt")};
  for (const auto& entry : std::filesystem::directory_iterator(testing::repository_file("tests/data/nasty"))) {
    files.push_back(entry.path().string());
  }
  for (const std::string& file : files) {
    const std::string once = normalize(read_file(file));
    EXPECT_EQ(normalize(once), once) << file;
    for (const char c : once) ASSERT_TRUE(c >= 0x20 && c < 0x7F) << file;
    EXPECT_EQ(once.find("  "), std::string::npos) << file;
  }
}

TEST(NormalizeTest, TheOneExceptionToIdempotence) {
  const std::string once = normalize("`\xE4\xB8\xAD`");
  EXPECT_EQ(once, "``");
  EXPECT_EQ(normalize(once), "\"");
}

TEST(CleanTest, CountsWhatItDrops) {
  CleanCounts counts;
  std::string out;
  append_clean_utf8(std::string_view("ok \xC3\xA9 \xFF\xFE \0\0 \xE6\x96", 14), out, counts);
  EXPECT_EQ(out, "ok \xC3\xA9   ");
  EXPECT_EQ(counts.invalid_bytes, 4);
  EXPECT_EQ(counts.nul_bytes, 2);
  // Surrogates, overlong forms and code points above U+10FFFF are not UTF-8.
  for (const char* bad : {"\xED\xA0\x80", "\xC0\x80", "\xF4\x90\x80\x80"}) {
    CleanCounts here;
    std::string nothing;
    append_clean_utf8(bad, nothing, here);
    EXPECT_EQ(nothing, "") << bad;
    EXPECT_EQ(here.invalid_bytes, static_cast<std::int64_t>(std::string_view(bad).size()));
  }
}

TEST(CleanTest, CodePoints) { EXPECT_EQ(count_code_points("a\xC3\xA9\xE4\xB8\xAD\xF0\x9F\x98\x80"), 4); }

TEST(EncodingTest, ByteOrderMarks) {
  EXPECT_EQ(foreign_encoding("\xFF\xFEP"), "UTF-16LE");
  EXPECT_EQ(foreign_encoding("\xFE\xFF"), "UTF-16BE");
  EXPECT_EQ(foreign_encoding(std::string_view("\xFF\xFE\0\0", 4)), "UTF-32LE");
  EXPECT_EQ(foreign_encoding("\xEF\xBB\xBFx"), "");
  EXPECT_EQ(foreign_encoding(""), "");
}

}  // namespace
}  // namespace cram
