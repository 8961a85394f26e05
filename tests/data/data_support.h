// Small worlds for the tests of the data room.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/digest.h"
#include "base/file_io.h"
#include "data/manifest.h"
#include "data/shard.h"
#include "support/temporary_folder.h"

namespace cram::testing {

/// A folder that goes away with its test, and files in it.
class TemporaryFolder {
 public:
  [[nodiscard]] std::string path(const std::string& name = "") const {
    return name.empty() ? folder_.path().string() : folder_ / name;
  }
  std::string write(const std::string& name, const std::string& content) const {
    const std::filesystem::path file = path(name);
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file, std::ios::binary) << content;
    return file.string();
  }

 private:
  test::TemporaryFolder folder_;
};

/// Runs and returns the error; fails the test when nothing was thrown.
inline Error error_of(const std::function<void()>& run) {
  try {
    run();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "expected an Error";
  return Error(ExitCode::kOk, "");
}

inline void flip_bit(const std::string& path, std::uint64_t bit) {
  std::string content = read_file(path);
  ASSERT_LT(bit / 8, content.size());
  content[bit / 8] = static_cast<char>(content[bit / 8] ^ (1 << (bit % 8)));
  std::ofstream(path, std::ios::binary | std::ios::trunc) << content;
}

using Rows = std::vector<std::vector<std::uint32_t>>;

/// Row r is r, r+1, ... in [5, V): every row differs from its neighbours.
inline Rows counting_rows(std::int64_t count, std::int64_t seq_length, std::int64_t vocab_size) {
  Rows rows;
  for (std::int64_t r = 0; r < count; ++r) {
    std::vector<std::uint32_t> row;
    for (std::int64_t s = 0; s < seq_length; ++s)
      row.push_back(static_cast<std::uint32_t>(5 + (7 * r + s) % (vocab_size - 5)));
    rows.push_back(row);
  }
  return rows;
}

inline FillRows fill_from(const Rows& rows, std::int64_t offset = 0) {
  return [&rows, offset](std::int64_t first, std::int64_t count, std::uint32_t* out) {
    for (std::int64_t i = 0; i < count; ++i) {
      const auto& row = rows[static_cast<std::size_t>(offset + first + i)];
      out = std::copy(row.begin(), row.end(), out);
    }
  };
}

struct FolderShape {
  std::int64_t seq_length = 8;
  std::int64_t vocab_size = 50;
  std::int64_t rows_per_shard = 700;
};

/// A prepared folder with these rows, without a corpus behind it.
inline void write_prepared(const std::string& folder, const Rows& train, const Rows& validation,
                           const FolderShape& shape = {}) {
  std::filesystem::create_directories(folder);
  const std::string model = "not a model, but its digest is right";
  write_file_atomically(std::filesystem::path(folder) / kTokenizerFileName, model);
  Manifest manifest;
  manifest.kind = "shards";
  manifest.inputs_digest = digest_text("inputs");
  manifest.tokenizer = {shape.vocab_size, "bpe", digest_text("vocabulary"), digest_text(model)};
  manifest.seq_length = shape.seq_length;
  manifest.order = "none";
  const auto write = [&](const std::string& name, const Rows& rows) {
    SplitRecord& split = manifest.splits[name];
    split.rows = static_cast<std::int64_t>(rows.size());
    for (std::int64_t first = 0; first < split.rows; first += shape.rows_per_shard) {
      const auto index = static_cast<std::int64_t>(split.shards.size());
      const ShardHeader header{
          shape.seq_length, shape.vocab_size,         std::min(shape.rows_per_shard, split.rows - first), index, name,
          "none",           manifest.tokenizer.digest};
      split.shards.push_back(write_shard(folder + "/" + name + "-" +
                                             std::string(index < 10    ? "0000"
                                                         : index < 100 ? "000"
                                                                       : "00") +
                                             std::to_string(index) + ".h5",
                                         header, fill_from(rows, first)));
    }
  };
  write("train", train);
  write("validation", validation);
  write_manifest(folder, manifest);
}

/// CRAM_DATA_DIR or "" (data that is not in the repository).
inline std::string outside_data() {
  const char* folder = std::getenv("CRAM_DATA_DIR");
  return folder == nullptr ? "" : folder;
}

inline std::string repository_file(const std::string& name) { return std::string(CRAM_SOURCE_DIR) + "/" + name; }

}  // namespace cram::testing
