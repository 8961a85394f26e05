// Whole arrays in HDF5 files, every return value checked. hdf5.h stays in the .cpp.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/check.h"

namespace cram {

/// Must come before any other use of HDF5 in the process. Silences its error stack on stderr, and switches off its
/// clean-up at exit: a file that could not be closed (disk full) stays open inside the library, and the clean-up
/// crashes on it. Every file of ours is closed where it is used.
void set_up_hdf5();

enum class ArrayType { kU16, kU32, kI64, kF32, kF64 };
[[nodiscard]] std::size_t array_item_bytes(ArrayType type);

struct ArrayInfo {
  ArrayType type = ArrayType::kF32;
  std::vector<std::int64_t> shape;
};

/// Writes a new file. Nothing is durable before `close()` returned: a disk that fills up shows there at the latest.
class ArrayFileWriter {
 public:
  ArrayFileWriter(const std::string& path, ExitCode code);
  ~ArrayFileWriter();  ///< closes without checks; the file is then not to be trusted
  ArrayFileWriter(const ArrayFileWriter&) = delete;
  ArrayFileWriter& operator=(const ArrayFileWriter&) = delete;

  /// `name` may hold '/' for groups, which are made. Contiguous little-endian storage.
  void write(const std::string& name, const ArrayInfo& info, const void* data);
  void close();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

class ArrayFileReader {
 public:
  ArrayFileReader(const std::string& path, ExitCode code);
  ~ArrayFileReader();
  ArrayFileReader(const ArrayFileReader&) = delete;
  ArrayFileReader& operator=(const ArrayFileReader&) = delete;

  [[nodiscard]] bool has(const std::string& name) const;
  [[nodiscard]] ArrayInfo info(const std::string& name) const;
  /// Where the array's contiguous numbers begin in the file, in bytes; -1 for one without elements.
  [[nodiscard]] std::int64_t offset(const std::string& name) const;
  /// Reads the whole array; `expected` must match type and shape.
  void read(const std::string& name, const ArrayInfo& expected, void* data) const;
  /// Reads rows [first, first + rows) of the first dimension, all of the others. An array without dimensions is one
  /// row.
  void read_rows(const std::string& name, const ArrayInfo& expected, std::int64_t first, std::int64_t rows,
                 void* data) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace cram
