// safetensors files: strict reader and writer (format: 8-byte little-endian header length, JSON header, tensor bytes).
//
// The reader refuses whatever the official one refuses: headers over 100 MB, duplicate names, holes, overlaps, sizes
// that do not match shape and dtype, trailing bytes. Tensors are views of the mapped file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/check.h"

namespace cram {

struct SafetensorsEntry {
  std::string dtype;  ///< F64 F32 F16 BF16 I64 I32 I16 I8 U8 BOOL
  std::vector<std::int64_t> shape;
  std::size_t begin = 0;  ///< bytes, relative to the data area
  std::size_t end = 0;
};

/// Bytes of one element; 0 for an unknown dtype.
[[nodiscard]] std::size_t safetensors_item_bytes(const std::string& dtype);

class SafetensorsFile {
 public:
  /// Opens and checks everything but the values. Throws Error(code) with path and reason.
  static SafetensorsFile open(const std::string& path, ExitCode code = ExitCode::kUsage);
  SafetensorsFile(SafetensorsFile&&) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept;
  ~SafetensorsFile();

  [[nodiscard]] const std::map<std::string, SafetensorsEntry>& entries() const { return entries_; }
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const { return metadata_; }
  [[nodiscard]] const SafetensorsEntry* find(const std::string& name) const;
  /// First byte of the tensor; valid as long as this object. Not aligned beyond what the header's length gives.
  [[nodiscard]] const std::byte* data(const SafetensorsEntry& entry) const;

 private:
  struct Mapping;
  SafetensorsFile();
  std::unique_ptr<Mapping> mapping_;
  std::map<std::string, SafetensorsEntry> entries_;
  std::map<std::string, std::string> metadata_;
  std::size_t data_start_ = 0;
};

/// One tensor to write; `data` must stay valid during the call and hold shape x dtype contiguous bytes.
struct SafetensorsItem {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
  const void* data = nullptr;
};

/// Writes under a temporary name, fsyncs, renames. Items keep their order; equal input gives equal bytes.
void write_safetensors(const std::string& path, const std::vector<SafetensorsItem>& items,
                       const std::map<std::string, std::string>& metadata, ExitCode code = ExitCode::kOther);

}  // namespace cram
