// Bytes of a plain, gzip or zstd file, told apart by their first bytes.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace cram {

class ByteReader {
 public:
  virtual ~ByteReader() = default;
  /// Up to `bytes` decompressed bytes; 0 at the end. Error(kData) for unreadable, damaged or truncated files.
  [[nodiscard]] virtual std::size_t read(char* out, std::size_t bytes) = 0;
};

/// `name` is for messages, and a name in .gz or .zst demands that compression.
[[nodiscard]] std::unique_ptr<ByteReader> open_bytes(const std::string& path, const std::string& name);

}  // namespace cram
