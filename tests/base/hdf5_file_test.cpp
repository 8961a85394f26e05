#include "base/hdf5_file.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/digest.h"
#include "base/file_io.h"
#include "support/expect_error.h"
#include "support/file_size_limit.h"
#include "support/temporary_folder.h"

namespace cram {
namespace {

namespace fs = std::filesystem;
using test::expect_error;
using test::TemporaryFolder;
constexpr ExitCode kData = ExitCode::kData;

void write_sample(const std::string& path) {
  const std::vector<double> a{1.5, -0.0, 5e-324, 1e300, 0, 7};
  const std::vector<float> b{1, 2, 3};
  const std::vector<std::uint16_t> c{0, 65535, 32768, 1};
  const std::vector<std::uint32_t> d{0, 4294967295U};
  const std::vector<std::int64_t> e{-1, INT64_MIN, INT64_MAX};
  ArrayFileWriter writer(path, kData);
  writer.write("/master/encoder.a", {ArrayType::kF64, {2, 3}}, a.data());
  writer.write("/master/encoder.b", {ArrayType::kF32, {3}}, b.data());
  writer.write("c", {ArrayType::kU16, {2, 2}}, c.data());
  writer.write("/deep/er/d", {ArrayType::kU32, {2, 1, 1}}, d.data());
  writer.write("e", {ArrayType::kI64, {3}}, e.data());
  writer.write("scalar", {ArrayType::kF64, {}}, a.data());
  writer.write("none", {ArrayType::kF32, {0, 5}}, b.data());
  writer.close();
}

TEST(Hdf5File, RoundTripsEveryTypeAndShape) {
  const TemporaryFolder folder;
  write_sample(folder / "x.h5");
  const ArrayFileReader reader(folder / "x.h5", kData);
  std::vector<double> a(6);
  reader.read("/master/encoder.a", {ArrayType::kF64, {2, 3}}, a.data());
  const std::vector<double> expected{1.5, -0.0, 5e-324, 1e300, 0, 7};
  EXPECT_EQ(std::memcmp(a.data(), expected.data(), 48), 0);
  std::vector<float> b(3);
  reader.read("master/encoder.b", {ArrayType::kF32, {3}}, b.data());
  EXPECT_EQ(b, (std::vector<float>{1, 2, 3}));
  std::vector<std::uint16_t> c(4);
  reader.read("/c", {ArrayType::kU16, {2, 2}}, c.data());
  EXPECT_EQ(c, (std::vector<std::uint16_t>{0, 65535, 32768, 1}));
  std::vector<std::uint32_t> d(2);
  reader.read("/deep/er/d", {ArrayType::kU32, {2, 1, 1}}, d.data());
  EXPECT_EQ(d, (std::vector<std::uint32_t>{0, 4294967295U}));
  std::vector<std::int64_t> e(3);
  reader.read("e", {ArrayType::kI64, {3}}, e.data());
  EXPECT_EQ(e, (std::vector<std::int64_t>{-1, INT64_MIN, INT64_MAX}));
  double scalar = 0;
  reader.read("scalar", {ArrayType::kF64, {}}, &scalar);
  EXPECT_EQ(scalar, 1.5);
  float nothing = -7;
  reader.read("none", {ArrayType::kF32, {0, 5}}, &nothing);
  EXPECT_EQ(nothing, -7);
  EXPECT_EQ(reader.info("/deep/er/d").shape, (std::vector<std::int64_t>{2, 1, 1}));
  EXPECT_EQ(reader.info("/deep/er/d").type, ArrayType::kU32);
}

TEST(Hdf5File, HasSaysWhatThereIs) {
  const TemporaryFolder folder;
  write_sample(folder / "x.h5");
  const ArrayFileReader reader(folder / "x.h5", kData);
  for (const char* name : {"c", "/c", "/master/encoder.a", "master", "/deep/er"}) EXPECT_TRUE(reader.has(name)) << name;
  for (const char* name : {"d", "/master/encoder.c", "/nowhere/x", "/c/x", "/deep/er/d/e"}) {
    EXPECT_FALSE(reader.has(name)) << name;
  }
}

TEST(Hdf5File, RefusesWrongNamesShapesAndTypes) {
  const TemporaryFolder folder;
  write_sample(folder / "x.h5");
  const ArrayFileReader reader(folder / "x.h5", kData);
  std::vector<double> out(64, -7);
  const auto refuse = [&](const std::string& name, const ArrayInfo& info, const std::string& word) {
    expect_error(
        kData, {name, "x.h5", word}, [&] { reader.read(name, info, out.data()); }, name);
  };
  refuse("/master/encoder.a", {ArrayType::kF64, {3, 2}}, "[2,3]");
  refuse("/master/encoder.a", {ArrayType::kF64, {6}}, "[6]");
  refuse("/master/encoder.a", {ArrayType::kF64, {}}, "[]");
  refuse("/master/encoder.a", {ArrayType::kF32, {2, 3}}, "64 bits");
  refuse("/master/encoder.b", {ArrayType::kF64, {3}}, "32 bits");
  refuse("e", {ArrayType::kF64, {3}}, "e");
  refuse("/master/encoder.c", {ArrayType::kF64, {1}}, "no array");
  refuse("/master", {ArrayType::kF64, {1}}, "master");
  for (const double value : out) EXPECT_EQ(value, -7);
}

TEST(Hdf5File, WriterRefusesWhatExists) {
  const TemporaryFolder folder;
  write_sample(folder / "x.h5");
  const std::string before = read_file(folder / "x.h5");
  expect_error(kData, {"x.h5", "exists"}, [&] { ArrayFileWriter writer(folder / "x.h5", kData); });
  EXPECT_EQ(read_file(folder / "x.h5"), before);
  expect_error(kData, {"cannot create"}, [&] { ArrayFileWriter writer(folder / "no/x.h5", kData); });
  const float one = 1;
  ArrayFileWriter writer(folder / "y.h5", kData);
  writer.write("a", {ArrayType::kF32, {1}}, &one);
  expect_error(kData, {"a", "y.h5"}, [&] { writer.write("a", {ArrayType::kF32, {1}}, &one); });
  expect_error(kData, {"a/b", "y.h5"}, [&] { writer.write("a/b", {ArrayType::kF32, {1}}, &one); });
  writer.close();
  expect_error(kData, {"y.h5"}, [&] { writer.close(); });
  expect_error(kData, {"y.h5"}, [&] { writer.write("b", {ArrayType::kF32, {1}}, &one); });
}

TEST(Hdf5File, TheSameArraysGiveTheSameBytes) {
  const TemporaryFolder folder;
  write_sample(folder / "x.h5");
  write_sample(folder / "y.h5");
  EXPECT_EQ(read_file(folder / "x.h5"), read_file(folder / "y.h5"));
}

TEST(Hdf5File, ReaderRefusesWhatIsNotHdf5) {
  const TemporaryFolder folder;
  expect_error(kData, {"missing.h5"}, [&] { ArrayFileReader reader(folder / "missing.h5", kData); });
  write_file_atomically(folder / "text.h5", "not HDF5");
  expect_error(kData, {"text.h5"}, [&] { ArrayFileReader reader(folder / "text.h5", kData); });
  write_file_atomically(folder / "empty.h5", "");
  expect_error(kData, {"empty.h5"}, [&] { ArrayFileReader reader(folder / "empty.h5", kData); });
  expect_error(kData, {}, [&] { ArrayFileReader reader(folder.path().string(), kData); });
}

TEST(Hdf5File, EveryTruncationIsRefused) {
  const TemporaryFolder folder;
  write_sample(folder / "x.h5");
  const std::string whole = read_file(folder / "x.h5");
  for (std::size_t tenth = 0; tenth < 20; ++tenth) {
    const std::string name = folder / concat("cut", tenth, ".h5");
    write_file_atomically(name, whole.substr(0, whole.size() * tenth / 20));
    // The end of the file is in its header, so opening is enough; no array may be read either way.
    expect_error(
        kData, {name},
        [&] {
          const ArrayFileReader reader(name, kData);
          std::vector<std::int64_t> e(3);
          reader.read("e", {ArrayType::kI64, {3}}, e.data());
        },
        name);
  }
}

TEST(Hdf5File, ADiskThatFillsUpIsAnErrorAtTheLatestAtClose) {
  const TemporaryFolder folder;
  const std::vector<float> large(200'000);
  for (const std::uint64_t room : {0U, 100U, 3000U, 500'000U, 799'000U}) {
    const test::FileSizeLimit limit(room);
    const std::string name = folder / concat("full", room, ".h5");
    expect_error(
        ExitCode::kCheckpointStorage, {name},
        [&] {
          ArrayFileWriter writer(name, ExitCode::kCheckpointStorage);
          writer.write("/master/a", {ArrayType::kF32, {200'000}}, large.data());
          writer.close();
        },
        name);
  }
  // Small arrays wait in the library's buffers: only closing shows that they found no room.
  for (const std::uint64_t room : {0U, 100U, 1000U}) {
    const test::FileSizeLimit limit(room);
    const std::string name = folder / concat("small", room, ".h5");
    expect_error(
        ExitCode::kCheckpointStorage, {name},
        [&] {
          ArrayFileWriter writer(name, ExitCode::kCheckpointStorage);
          writer.write("/master/a", {ArrayType::kF32, {3}}, large.data());
          writer.close();
        },
        name);
  }
  // Room again: the library must not be stuck with the failed files.
  write_sample(folder / "x.h5");
  const ArrayFileReader reader(folder / "x.h5", kData);
  EXPECT_TRUE(reader.has("e"));
}

TEST(Hdf5FileDeathTest, AProcessThatMetAFullDiskStillEndsWithItsOwnExitCode) {
  const TemporaryFolder folder;
  const auto fill_and_exit = [&] {
    const std::vector<float> large(200'000);
    {
      const test::FileSizeLimit limit(100'000);
      try {
        ArrayFileWriter writer(folder / "x.h5", ExitCode::kCheckpointStorage);
        writer.write("/master/a", {ArrayType::kF32, {200'000}}, large.data());
        writer.close();
      } catch (const Error& error) {
        std::exit(static_cast<int>(error.code()));
      }
    }
    std::exit(0);
  };
  EXPECT_EXIT(fill_and_exit(), testing::ExitedWithCode(21), "");
}

TEST(Hdf5File, ItemBytes) {
  EXPECT_EQ(array_item_bytes(ArrayType::kU16), 2U);
  EXPECT_EQ(array_item_bytes(ArrayType::kU32), 4U);
  EXPECT_EQ(array_item_bytes(ArrayType::kF32), 4U);
  EXPECT_EQ(array_item_bytes(ArrayType::kI64), 8U);
  EXPECT_EQ(array_item_bytes(ArrayType::kF64), 8U);
}

TEST(ArrayFile, EqualContentGivesEqualBytesWheneverItIsWritten) {
  const TemporaryFolder folder;
  const auto write = [&](const std::string& name) {
    ArrayFileWriter writer(folder / name, ExitCode::kOther);
    const std::vector<float> values(10, 1.5F);
    writer.write("/group/values", {ArrayType::kF32, {10}}, values.data());
    writer.close();
    return digest_file(folder / name);
  };
  const std::string first = write("a.h5");
  std::this_thread::sleep_for(std::chrono::milliseconds(1100));  // a stamp would count whole seconds
  EXPECT_EQ(first, write("b.h5"));
}

}  // namespace
}  // namespace cram
