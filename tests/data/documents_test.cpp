#include "data/documents.h"

#include <gtest/gtest.h>
#include <zlib.h>
#include <zstd.h>

#include "data/json_text.h"
#include "data_support.h"

namespace cram {
namespace {

using testing::error_of;
using testing::TemporaryFolder;

struct Read {
  std::vector<std::string> texts;
  Account account{"read"};
  std::string findings;
};

Read read_all(const std::vector<std::string>& inputs) {
  DocumentSource source(find_inputs(inputs));
  Read read;
  Document document;
  while (source.next(document)) read.texts.push_back(document.text);
  read.account = source.account();
  read.findings = source.findings();
  EXPECT_TRUE(read.account.balances()) << inputs.front();
  return read;
}

std::string gzipped(const std::string& text) {
  z_stream stream{};
  EXPECT_EQ(deflateInit2(&stream, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
  std::string out(deflateBound(&stream, text.size()) + 64, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

std::string zstandard(const std::string& text) {
  std::string out(ZSTD_compressBound(text.size()), '\0');
  out.resize(ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 3));
  return out;
}

TEST(DocumentsTest, BlankLinesSeparateDocuments) {
  const TemporaryFolder folder;
  const std::string file = folder.write("a.txt", "\n\none\nstill one\n \t \ntwo\n\n\n\nthree");
  const Read read = read_all({file});
  EXPECT_EQ(read.texts, (std::vector<std::string>{"one\nstill one", "two", "three"}));
  EXPECT_EQ(read.account.input().bytes, static_cast<std::int64_t>(std::filesystem::file_size(file)));
  EXPECT_EQ(read.account.kept().bytes, 13 + 3 + 5);
  EXPECT_EQ(read.account.kept().documents, 3);
}

TEST(DocumentsTest, EveryLineEndGivesTheSameDocuments) {
  const TemporaryFolder folder;
  const Read lf = read_all({folder.write("a.txt", "one\ntwo\n\nthree\n")});
  EXPECT_EQ(read_all({folder.write("b.txt", "one\r\ntwo\r\n\r\nthree\r\n")}).texts, lf.texts);
  EXPECT_EQ(read_all({folder.write("c.txt", "one\rtwo\r\rthree\r")}).texts, lf.texts);
  EXPECT_EQ(read_all({folder.write("d.txt", "\xEF\xBB\xBFone\r\ntwo\n\r\nthree")}).texts, lf.texts);
}

TEST(DocumentsTest, LineEndsAcrossReadBuffers) {
  // The reader's buffer has 2^18 bytes: put CR LF across its end, and a line over several buffers.
  const TemporaryFolder folder;
  for (const std::size_t length : {(std::size_t{1} << 18U) - 1, std::size_t{1} << 18U, std::size_t{1000000}}) {
    const std::string line(length, 'x');
    const Read read = read_all({folder.write("a.txt", line + "\r\nb\r\n\r\nc\r\n")});
    EXPECT_EQ(read.texts, (std::vector<std::string>{line + "\nb", "c"})) << length;
  }
}

TEST(DocumentsTest, JsonLines) {
  const TemporaryFolder folder;
  const std::string file = folder.write("a.jsonl",
                                        "{\"id\": 1, \"text\": \"one\\n\\u00e9 \\\"x\\\"\"}\n"
                                        "\n"
                                        "{\"text\": 5}\n"
                                        "not json\n"
                                        "[\"text\", \"no\"]\n"
                                        "{\"meta\": {\"text\": \"inner\"}, \"text\": \"outer\"}\r\n"
                                        "{\"text\": \"\"}\n"
                                        "{\"text\": \"nul \\u0000 here\"}\n"
                                        "{\"text\": \"lone \\ud800\"}\n"
                                        "{\"text\": \"bad \xFF byte\"}");
  const Read read = read_all({file});
  EXPECT_EQ(read.texts, (std::vector<std::string>{"one\n\xC3\xA9 \"x\"", "outer", "nul  here", "bad  byte"}));
  EXPECT_EQ(read.account.input().bytes, static_cast<std::int64_t>(std::filesystem::file_size(file)));
  EXPECT_EQ(read.account.input().documents, 9);
  EXPECT_EQ(read.account.dropped_for(drop_reason::kNotJson).documents, 3);
  EXPECT_EQ(read.account.dropped_for(drop_reason::kNoText).documents, 1);
  EXPECT_EQ(read.account.dropped_for(drop_reason::kEmpty).documents, 1);
  EXPECT_EQ(read.account.dropped_for(drop_reason::kNul).bytes, 1);
}

TEST(DocumentsTest, DeepJsonNeedsNoStack) {
  std::string deep = "{\"a\": " + std::string(2000000, '[') + std::string(2000000, ']') + ", \"text\": \"here\"}";
  std::string text;
  EXPECT_EQ(read_json_text(deep, text), JsonText::kOk);
  EXPECT_EQ(text, "here");
  EXPECT_EQ(read_json_text(std::string(2000000, '['), text), JsonText::kNotAnObject);
}

TEST(DocumentsTest, CompressedInputsEqualPlainOnes) {
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 20000; ++i) text += "line " + std::to_string(i * 7919 % 10007) + (i % 5 == 0 ? "\n\n" : "\n");
  std::string json;
  for (int i = 0; i < 500; ++i) json += "{\"text\": \"document " + std::to_string(i) + "\"}\n";
  const Read plain = read_all({folder.write("a.txt", text)});
  const Read plain_json = read_all({folder.write("a.jsonl", json)});
  const std::size_t half = text.size() / 2;
  const std::vector<std::string> packed{gzipped(text), zstandard(text),
                                        gzipped(text.substr(0, half)) + gzipped(text.substr(half)),
                                        zstandard(text.substr(0, half)) + zstandard(text.substr(half))};
  for (std::size_t i = 0; i < packed.size(); ++i) {
    const std::string name = i % 2 == 0 ? "b.txt.gz" : "b.txt.zst";
    const Read read = read_all({folder.write(name, packed[i])});
    EXPECT_EQ(read.texts, plain.texts) << i;
    EXPECT_EQ(read.account.input(), plain.account.input()) << i;
  }
  EXPECT_EQ(read_all({folder.write("c.jsonl.gz", gzipped(json))}).texts, plain_json.texts);
  EXPECT_EQ(read_all({folder.write("c.jsonl.zst", zstandard(json))}).texts, plain_json.texts);
}

TEST(DocumentsTest, DamagedCompressionIsAnError) {
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 5000; ++i) text += "line " + std::to_string(i * 7919 % 10007) + "\n";
  for (const bool gzip : {true, false}) {
    const std::string name = gzip ? "a.txt.gz" : "a.txt.zst";
    const std::string whole = gzip ? gzipped(text) : zstandard(text);
    for (const std::size_t cut : {whole.size() - 1, whole.size() / 2, std::size_t{20}}) {
      const std::string file = folder.write(name, whole.substr(0, cut));
      const Error error = error_of([&] { read_all({file}); });
      EXPECT_EQ(error.code(), ExitCode::kData) << name << " " << cut;
      EXPECT_NE(std::string(error.what()).find(name), std::string::npos);
    }
    EXPECT_EQ(error_of([&] { read_all({folder.write(name, text)}); }).code(), ExitCode::kData) << "not " << name;
    EXPECT_EQ(error_of([&] { read_all({folder.write(name, "")}); }).code(), ExitCode::kData) << "empty " << name;
  }
}

TEST(DocumentsTest, FoldersAreReadInOrderOfTheirPaths) {
  const TemporaryFolder folder;
  folder.write("in/b.txt", "b");
  folder.write("in/a/z.txt", "a z");
  folder.write("in/a/c.jsonl", "{\"text\": \"a c\"}");
  folder.write("in/README.md", "no");
  const InputList list = find_inputs({folder.path("in")});
  EXPECT_EQ(list.skipped_files, 1);
  EXPECT_EQ(read_all({folder.path("in")}).texts, (std::vector<std::string>{"a c", "a z", "b"}));
  // A file named by hand is read whatever its name, and content alone makes the digest.
  EXPECT_EQ(read_all({folder.path("in/README.md")}).texts, (std::vector<std::string>{"no"}));
  folder.write("copy/1.txt", "b");
  EXPECT_EQ(find_inputs({folder.path("in/b.txt")}).digest, find_inputs({folder.path("copy/1.txt")}).digest);
}

TEST(DocumentsTest, MissingAndForeignInputsAreRefused) {
  const TemporaryFolder folder;
  EXPECT_EQ(error_of([&] { static_cast<void>(find_inputs({folder.path("nothing.txt")})); }).code(), ExitCode::kData);
  folder.write("only/README.md", "no");
  EXPECT_EQ(error_of([&] { static_cast<void>(find_inputs({folder.path("only")})); }).code(), ExitCode::kData);
  const Error error = error_of([&] { read_all({testing::repository_file("tests/data/nasty/utf16le_bom.txt")}); });
  EXPECT_EQ(error.code(), ExitCode::kData);
  EXPECT_NE(std::string(error.what()).find("UTF-16LE"), std::string::npos);
}

void expect_sound(const std::filesystem::path& folder) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (!entry.is_regular_file() || entry.path().filename() == "utf16le_bom.txt") continue;
    ++files;
    const std::string name = entry.path().string();
    DocumentSource source(find_inputs({name}));
    PreparedDocuments documents(source, 2, "test");
    PreparedDocument document;
    while (documents.next(document)) EXPECT_FALSE(document.normalized.empty()) << name;
    EXPECT_TRUE(source.account().balances()) << name;
    EXPECT_TRUE(documents.account().balances()) << name;
    EXPECT_EQ(source.account().input().bytes, static_cast<std::int64_t>(entry.file_size())) << name;
    EXPECT_EQ(source.account().kept(), documents.account().input()) << name;
  }
  EXPECT_GT(files, 5);
}

TEST(DocumentsTest, NastyFilesOfTheRepository) { expect_sound(testing::repository_file("tests/data/nasty")); }

TEST(DocumentsTest, NastyFilesFromOutside) {
  if (testing::outside_data().empty()) GTEST_SKIP() << "not run: CRAM_DATA_DIR is not set";
  expect_sound(testing::outside_data() + "/nasty");
  expect_sound(testing::outside_data() + "/nasty/derived");
}

TEST(DocumentsTest, ThreadsDoNotChangeTheOrder) {
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 3000; ++i) text += "document number " + std::to_string(i) + "\n\n";
  const std::string file = folder.write("a.txt", text);
  const auto read = [&](int threads) {
    DocumentSource source(find_inputs({file}));
    PreparedDocuments documents(source, threads, "test");
    std::vector<std::string> all;
    PreparedDocument document;
    while (documents.next(document)) all.push_back(document.normalized);
    return all;
  };
  EXPECT_EQ(read(1).size(), 3000U);
  EXPECT_EQ(read(1), read(5));
}

TEST(DocumentsTest, AWorkersErrorComesOut) {
  const TemporaryFolder folder;
  DocumentSource source(find_inputs({folder.write("a.txt", "one\n\ntwo\n\nthree\n")}));
  PreparedDocuments documents(source, 3, "test", [](PreparedDocument& document) {
    CRAM_CHECK(document.normalized != "two", ExitCode::kData, "two");
  });
  PreparedDocument document;
  EXPECT_EQ(error_of([&] { static_cast<void>(documents.next(document)); }).code(), ExitCode::kData);
}

TEST(AccountTest, MustBalance) {
  Account account("stage");
  account.take(10, 2);
  account.keep(7, 1);
  account.drop("reason", 2, 1);
  EXPECT_FALSE(account.balances());
  EXPECT_THROW(static_cast<void>(account.text()), Error);
  account.drop("reason", 1);
  EXPECT_EQ(account.text(),
            "stage: input 10 bytes, 2 documents = kept 7 bytes, 1 documents + dropped 3 bytes, 1 documents (reason 3 "
            "bytes in 1 documents)");
  EXPECT_EQ(with_commas(1234567), "1,234,567");
  EXPECT_EQ(with_commas(-123), "-123");
  EXPECT_EQ(with_commas(1000), "1,000");
}

}  // namespace
}  // namespace cram
