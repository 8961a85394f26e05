#include "base/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <iterator>

#include "base/file_io.h"
#include "support/expect_error.h"
#include "support/file_size_limit.h"
#include "support/temporary_folder.h"

namespace cram {
namespace {

namespace fs = std::filesystem;
using test::expect_error;
using test::TemporaryFolder;

// A file with the given header, its right length and so many bytes of data.
std::string file_bytes(const std::string& header, std::size_t data_bytes) {
  const std::uint64_t length = header.size();
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  return bytes + header + std::string(data_bytes, '\x2a');
}

void write_bytes(const std::string& path, const std::string& bytes) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

struct Sample {
  std::vector<double> a{1.5, -2, 3e300, 0, -0.0, 5e-324};
  std::vector<float> b{1, 2, 3, 4};
  std::vector<std::uint16_t> c{0x3f80, 0x7fc0, 1};
  std::int64_t d = -5;
  std::vector<std::uint8_t> e{1, 0, 1};
  [[nodiscard]] std::vector<SafetensorsItem> items() const {
    return {{"a", "F64", {2, 3}, a.data()},
            {"layer.b", "F32", {2, 1, 2}, b.data()},
            {"c", "BF16", {3}, c.data()},
            {"scalar", "I64", {}, &d},
            {"empty", "F32", {0, 4}, nullptr},
            {"e", "BOOL", {3}, e.data()},
            {"\xc3\xa9 \"quoted\"", "U8", {3}, e.data()}};
  }
};

template <class T>
std::vector<T> values(const SafetensorsFile& file, const std::string& name) {
  const SafetensorsEntry* entry = file.find(name);
  if (entry == nullptr) return {};
  std::vector<T> out((entry->end - entry->begin) / sizeof(T));
  if (!out.empty()) std::memcpy(out.data(), file.data(*entry), out.size() * sizeof(T));
  return out;
}

TEST(Safetensors, RoundTripsEveryBit) {
  const TemporaryFolder folder;
  const Sample sample;
  write_safetensors(folder / "x", sample.items(), {{"format", "pt"}, {"k", "v"}});
  const SafetensorsFile file = SafetensorsFile::open(folder / "x");
  EXPECT_EQ(file.metadata(), (std::map<std::string, std::string>{{"format", "pt"}, {"k", "v"}}));
  EXPECT_EQ(file.entries().size(), sample.items().size());
  for (const SafetensorsItem& item : sample.items()) {
    ASSERT_NE(file.find(item.name), nullptr) << item.name;
    EXPECT_EQ(file.find(item.name)->dtype, item.dtype);
    EXPECT_EQ(file.find(item.name)->shape, item.shape);
  }
  const std::vector<double> a = values<double>(file, "a");
  EXPECT_EQ(std::memcmp(a.data(), sample.a.data(), a.size() * 8), 0);
  EXPECT_EQ(values<float>(file, "layer.b"), sample.b);
  EXPECT_EQ(values<std::uint16_t>(file, "c"), sample.c);
  EXPECT_EQ(values<std::int64_t>(file, "scalar"), std::vector<std::int64_t>{-5});
  EXPECT_TRUE(values<float>(file, "empty").empty());
  EXPECT_EQ(file.find("nothing"), nullptr);
}

TEST(Safetensors, EqualInputGivesEqualAlignedBytes) {
  const TemporaryFolder folder;
  const Sample sample;
  write_safetensors(folder / "x", sample.items(), {{"format", "pt"}});
  write_safetensors(folder / "y", sample.items(), {{"format", "pt"}});
  EXPECT_EQ(read_file(folder / "x"), read_file(folder / "y"));
  const SafetensorsFile file = SafetensorsFile::open(folder / "x");
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(file.data(*file.find("a"))) % 8, 0U);
}

TEST(Safetensors, MovedFilesKeepTheirTensors) {
  const TemporaryFolder folder;
  const Sample sample;
  write_safetensors(folder / "x", sample.items(), {});
  SafetensorsFile first = SafetensorsFile::open(folder / "x");
  const SafetensorsFile second = std::move(first);
  EXPECT_EQ(values<float>(second, "layer.b"), sample.b);
}

TEST(Safetensors, WriterRefusesUnknownTypesAndDoubleNames) {
  const TemporaryFolder folder;
  const float x = 1;
  expect_error(ExitCode::kOther, {"a"}, [&] { write_safetensors(folder / "x", {{"a", "F31", {1}, &x}}, {}); });
  expect_error(ExitCode::kOther, {"a"}, [&] {
    write_safetensors(folder / "x", {{"a", "F32", {1}, &x}, {"a", "F32", {1}, &x}}, {});
  });
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(Safetensors, FailedWritesLeaveTheOldFileAndNoTemporary) {
  const TemporaryFolder folder;
  const Sample sample;
  write_safetensors(folder / "x", sample.items(), {});
  const std::string before = read_file(folder / "x");
  const std::vector<float> large(100'000);
  {
    const test::FileSizeLimit limit(50'000);
    expect_error(ExitCode::kCheckpointStorage, {"x", "400"}, [&] {
      write_safetensors(folder / "x", {{"a", "F32", {100'000}, large.data()}}, {}, ExitCode::kCheckpointStorage);
    });
  }
  EXPECT_EQ(read_file(folder / "x"), before);
  fs::create_directories(folder / "taken/full");
  expect_error(ExitCode::kOther, {"taken"}, [&] { write_safetensors(folder / "taken", sample.items(), {}); });
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator{}), 2);
  expect_error(ExitCode::kOther, {"cannot create"}, [&] { write_safetensors(folder / "no/x", sample.items(), {}); });
}

struct Hostile {
  const char* why;
  std::string bytes;
};

const std::vector<Hostile>& hostile_files() {
  const auto tensor = [](const std::string& name, const std::string& dtype, const std::string& shape,
                         const std::string& at) {
    return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":" + at + "}";
  };
  static const std::vector<Hostile> kFiles = {
      {"empty file", ""},
      {"seven bytes", std::string(7, '\0')},
      {"no header", std::string(8, '\0')},
      {"header longer than the file", std::string("\x10\0\0\0\0\0\0\0{}", 10)},
      {"header of 2^63 bytes", std::string("\0\0\0\0\0\0\0\x80{}", 10)},
      {"header of 2^64-1 bytes", std::string(8, '\xff') + "{}"},
      {"header over 100 MB", std::string("\x01\xe1\xf5\x05\0\0\0\0{}", 10)},
      {"header does not start with {", file_bytes(" {}", 0)},
      {"header is an array", file_bytes("[]", 0)},
      {"header is not JSON", file_bytes("{\"a\"", 0)},
      {"header is not UTF-8", file_bytes("{\"\xff\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}", 4)},
      {"two documents", file_bytes("{}{}", 0)},
      {"comment", file_bytes("{/*x*/}", 0)},
      {"trailing comma", file_bytes("{" + tensor("a", "F32", "[1]", "[0,4]") + ",}", 4)},
      {"NUL in the header", file_bytes(std::string("{}\0", 3), 0)},
      {"hole at the start", file_bytes("{" + tensor("a", "F32", "[1]", "[4,8]") + "}", 8)},
      {"hole between",
       file_bytes("{" + tensor("a", "F32", "[1]", "[0,4]") + "," + tensor("b", "F32", "[1]", "[8,12]") + "}", 12)},
      {"overlap",
       file_bytes("{" + tensor("a", "F32", "[1]", "[0,4]") + "," + tensor("b", "F32", "[1]", "[0,4]") + "}", 4)},
      {"partial overlap",
       file_bytes("{" + tensor("a", "F32", "[2]", "[0,8]") + "," + tensor("b", "F32", "[1]", "[4,8]") + "}", 8)},
      {"duplicate tensor",
       file_bytes("{" + tensor("a", "F32", "[1]", "[0,4]") + "," + tensor("a", "F32", "[1]", "[4,8]") + "}", 8)},
      {"duplicate field",
       file_bytes("{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4)},
      {"duplicate metadata", file_bytes("{\"__metadata__\":{\"k\":\"1\",\"k\":\"2\"}}", 0)},
      {"size below the shape", file_bytes("{" + tensor("a", "F32", "[2]", "[0,4]") + "}", 4)},
      {"size above the shape", file_bytes("{" + tensor("a", "F32", "[1]", "[0,8]") + "}", 8)},
      {"end before begin", file_bytes("{" + tensor("a", "F32", "[1]", "[4,0]") + "}", 4)},
      {"trailing bytes", file_bytes("{" + tensor("a", "F32", "[1]", "[0,4]") + "}", 5)},
      {"missing bytes", file_bytes("{" + tensor("a", "F32", "[1]", "[0,4]") + "}", 3)},
      {"shape that overflows to the size",
       file_bytes("{" + tensor("a", "F32", "[4611686018427387905]", "[0,4]") + "}", 4)},
      {"product that overflows", file_bytes("{" + tensor("a", "F32", "[4294967296,4294967296]", "[0,0]") + "}", 0)},
      {"extent over 2^63", file_bytes("{" + tensor("a", "F32", "[9223372036854775808,0]", "[0,0]") + "}", 0)},
      {"extent over 2^64", file_bytes("{" + tensor("a", "F32", "[18446744073709551616]", "[0,4]") + "}", 4)},
      {"negative extent", file_bytes("{" + tensor("a", "F32", "[-1]", "[0,4]") + "}", 4)},
      {"fractional extent", file_bytes("{" + tensor("a", "F32", "[1.0]", "[0,4]") + "}", 4)},
      {"text extent", file_bytes("{" + tensor("a", "F32", "[\"1\"]", "[0,4]") + "}", 4)},
      {"null extent", file_bytes("{" + tensor("a", "F32", "[null]", "[0,4]") + "}", 4)},
      {"nested shape", file_bytes("{" + tensor("a", "F32", "[[1]]", "[0,4]") + "}", 4)},
      {"object in the shape", file_bytes("{" + tensor("a", "F32", "[{}]", "[0,4]") + "}", 4)},
      {"one offset", file_bytes("{" + tensor("a", "F32", "[1]", "[0]") + "}", 4)},
      {"three offsets", file_bytes("{" + tensor("a", "F32", "[1]", "[0,4,8]") + "}", 4)},
      {"offsets beyond 2^63",
       file_bytes("{" + tensor("a", "F32", "[1]", "[18446744073709551612,18446744073709551615]") + "}", 4)},
      {"unknown dtype", file_bytes("{" + tensor("a", "F31", "[1]", "[0,4]") + "}", 4)},
      {"empty dtype", file_bytes("{" + tensor("a", "", "[1]", "[0,4]") + "}", 4)},
      {"dtype is a number", file_bytes("{\"a\":{\"dtype\":32,\"shape\":[1],\"data_offsets\":[0,4]}}", 4)},
      {"shape is text", file_bytes("{\"a\":{\"dtype\":\"F32\",\"shape\":\"1\",\"data_offsets\":[0,4]}}", 4)},
      {"no dtype", file_bytes("{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4)},
      {"no shape", file_bytes("{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4)},
      {"no offsets", file_bytes("{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4)},
      {"unknown field", file_bytes("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"x\":1}}", 4)},
      {"tensor is a number", file_bytes("{\"a\":1}", 0)},
      {"tensor is null", file_bytes("{\"a\":null}", 0)},
      {"metadata is text", file_bytes("{\"__metadata__\":\"x\"}", 0)},
      {"metadata holds a number", file_bytes("{\"__metadata__\":{\"k\":1}}", 0)},
      {"metadata holds an object", file_bytes("{\"__metadata__\":{\"k\":{}}}", 0)},
      {"metadata holds an array", file_bytes("{\"__metadata__\":{\"k\":[]}}", 0)},
      {"deep objects", file_bytes(
                           "{" +
                               [] {
                                 std::string deep;
                                 for (int i = 0; i < 200'000; ++i) deep += "\"a\":{";
                                 return deep;
                               }(),
                           0)},
      {"deep arrays", file_bytes("{\"a\":{\"shape\":" + std::string(500'000, '['), 0)},
  };
  return kFiles;
}

TEST(Safetensors, HostileFilesAreRefused) {
  const TemporaryFolder folder;
  ASSERT_GE(hostile_files().size(), 25U);
  for (const Hostile& hostile : hostile_files()) {
    write_bytes(folder / "x", hostile.bytes);
    expect_error(
        ExitCode::kData, {folder / "x"}, [&] { (void)SafetensorsFile::open(folder / "x", ExitCode::kData); },
        hostile.why);
  }
  expect_error(ExitCode::kUsage, {"missing"}, [&] { (void)SafetensorsFile::open(folder / "missing"); });
  expect_error(ExitCode::kUsage, {}, [&] { (void)SafetensorsFile::open(folder.path().string()); });
  // The same builder makes files that are accepted, so the refusals above are about the content.
  write_bytes(folder / "x", file_bytes("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}  ", 4));
  EXPECT_NO_THROW((void)SafetensorsFile::open(folder / "x"));
  write_bytes(folder / "x", file_bytes("{}", 0));
  EXPECT_NO_THROW((void)SafetensorsFile::open(folder / "x"));
}

TEST(Safetensors, EveryTruncationIsRefused) {
  const TemporaryFolder folder;
  const Sample sample;
  write_safetensors(folder / "x", sample.items(), {{"format", "pt"}});
  const std::string whole = read_file(folder / "x");
  for (std::size_t length = 0; length < whole.size(); ++length) {
    write_bytes(folder / "y", whole.substr(0, length));
    expect_error(
        ExitCode::kUsage, {}, [&] { (void)SafetensorsFile::open(folder / "y"); }, concat(length, " bytes"));
  }
}

}  // namespace
}  // namespace cram
