// Scalars as TensorBoard event files: TFRecord frames (masked CRC32C) around hand-encoded protobuf messages.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

namespace cram {

class TensorBoardWriter {
 public:
  /// Opens a new events file in `folder`, which is made. Throws Error when that fails.
  explicit TensorBoardWriter(const std::string& folder);

  void scalar(const std::string& tag, std::int64_t step, double value);
  void flush();

 private:
  struct FileCloser {
    void operator()(std::FILE* file) const noexcept { std::fclose(file); }
  };
  void write_record(const std::string& message);
  std::unique_ptr<std::FILE, FileCloser> file_;
};

/// CRC32C (Castagnoli), as TFRecord files use it.
[[nodiscard]] std::uint32_t crc32c(const void* data, std::size_t bytes) noexcept;

}  // namespace cram
