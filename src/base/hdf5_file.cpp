#include "base/hdf5_file.h"

#include <hdf5.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/hdf5_handle.h"

namespace cram {
namespace {

static_assert(std::is_same_v<hid_t, std::int64_t> && std::is_same_v<herr_t, int>);
static_assert(!std::is_copy_constructible_v<Hdf5Handle>);

hid_t native_type(ArrayType type) {
  switch (type) {
    case ArrayType::kU16: return H5T_NATIVE_UINT16;
    case ArrayType::kU32: return H5T_NATIVE_UINT32;
    case ArrayType::kI64: return H5T_NATIVE_INT64;
    case ArrayType::kF32: return H5T_NATIVE_FLOAT;
    case ArrayType::kF64: return H5T_NATIVE_DOUBLE;
  }
  return -1;
}

hid_t stored_type(ArrayType type) {
  switch (type) {
    case ArrayType::kU16: return H5T_STD_U16LE;
    case ArrayType::kU32: return H5T_STD_U32LE;
    case ArrayType::kI64: return H5T_STD_I64LE;
    case ArrayType::kF32: return H5T_IEEE_F32LE;
    case ArrayType::kF64: return H5T_IEEE_F64LE;
  }
  return -1;
}

}  // namespace

std::unique_lock<std::recursive_mutex> hdf5_lock() {
  static std::recursive_mutex mutex;
  return std::unique_lock(mutex);
}

void set_up_hdf5() {
  const auto lock = hdf5_lock();
  static const herr_t kNoCleanUpAtExit = H5dont_atexit();
  static_cast<void>(kNoCleanUpAtExit);
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
}

Hdf5Handle hdf5_file_access() {
  const auto lock = hdf5_lock();
  set_up_hdf5();
  Hdf5Handle access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose);
  CRAM_CHECK(access.valid() && H5Pset_file_locking(access.get(), false, true) >= 0 &&
                 H5Pset_libver_bounds(access.get(), H5F_LIBVER_EARLIEST, H5F_LIBVER_V110) >= 0 &&
                 H5Pset_fclose_degree(access.get(), H5F_CLOSE_STRONG) >= 0,
             ExitCode::kOther, "HDF5 failed: file access list");
  return access;
}

std::size_t array_item_bytes(ArrayType type) {
  switch (type) {
    case ArrayType::kU16: return 2;
    case ArrayType::kU32:
    case ArrayType::kF32: return 4;
    case ArrayType::kI64:
    case ArrayType::kF64: return 8;
  }
  return 0;
}

struct ArrayFileWriter::State {
  std::string path;
  ExitCode code;
  Hdf5Handle file;
};

ArrayFileWriter::ArrayFileWriter(const std::string& path, ExitCode code) {
  const auto lock = hdf5_lock();
  const Hdf5Handle access = hdf5_file_access();
  errno = 0;
  Hdf5Handle file(H5Fcreate(path.c_str(), H5F_ACC_EXCL, H5P_DEFAULT, access.get()), H5Fclose);
  CRAM_CHECK(file.valid(), code, "cannot create ", path, ": ", errno != 0 ? std::strerror(errno) : "HDF5 refuses");
  state_.reset(new State{path, code, std::move(file)});
}

ArrayFileWriter::~ArrayFileWriter() = default;

void ArrayFileWriter::write(const std::string& name, const ArrayInfo& info, const void* data) {
  const auto lock = hdf5_lock();
  const std::vector<hsize_t> extents(info.shape.begin(), info.shape.end());
  const Hdf5Handle space(H5Screate_simple(static_cast<int>(extents.size()), extents.data(), nullptr), H5Sclose);
  const Hdf5Handle links(H5Pcreate(H5P_LINK_CREATE), H5Pclose);
  H5Pset_create_intermediate_group(links.get(), 1);
  const Hdf5Handle creation(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
  H5Pset_obj_track_times(creation.get(), false);  // equal content gives equal bytes, whenever it is written
  Hdf5Handle array(H5Dcreate2(state_->file.get(), name.c_str(), stored_type(info.type), space.get(), links.get(),
                              creation.get(), H5P_DEFAULT),
                   H5Dclose);
  const bool written =
      array.valid() && H5Dwrite(array.get(), native_type(info.type), H5S_ALL, H5S_ALL, H5P_DEFAULT, data) >= 0;
  CRAM_CHECK(written && array.close() >= 0, state_->code, "writing ", name, " ", shape_text(info.shape), " to ",
             state_->path, " failed: the disk may be full");
}

void ArrayFileWriter::close() {
  const auto lock = hdf5_lock();
  const bool flushed = H5Fflush(state_->file.get(), H5F_SCOPE_GLOBAL) >= 0;
  CRAM_CHECK(state_->file.close() >= 0 && flushed, state_->code, "closing ", state_->path,
             " failed: the disk may be full");
}

struct ArrayFileReader::State {
  std::string path;
  ExitCode code;
  Hdf5Handle file;
};

ArrayFileReader::ArrayFileReader(const std::string& path, ExitCode code) {
  const auto lock = hdf5_lock();
  const Hdf5Handle access = hdf5_file_access();
  Hdf5Handle file(H5Fopen(path.c_str(), H5F_ACC_RDONLY, access.get()), H5Fclose);
  CRAM_CHECK(file.valid(), code, "cannot read ", path, " as HDF5");
  state_.reset(new State{path, code, std::move(file)});
}

ArrayFileReader::~ArrayFileReader() = default;

bool ArrayFileReader::has(const std::string& name) const {
  const auto lock = hdf5_lock();
  // H5Lexists wants every group on the way to exist, so walk.
  for (std::size_t slash = name.find('/', 1); slash != std::string::npos; slash = name.find('/', slash + 1)) {
    if (H5Lexists(state_->file.get(), name.substr(0, slash).c_str(), H5P_DEFAULT) <= 0) return false;
  }
  return H5Lexists(state_->file.get(), name.c_str(), H5P_DEFAULT) > 0;
}

ArrayInfo ArrayFileReader::info(const std::string& name) const {
  const auto lock = hdf5_lock();
  CRAM_CHECK(has(name), state_->code, state_->path, " has no array ", name);
  const Hdf5Handle array(H5Dopen2(state_->file.get(), name.c_str(), H5P_DEFAULT), H5Dclose);
  CRAM_CHECK(array.valid(), state_->code, "cannot open ", name, " in ", state_->path);
  const Hdf5Handle space(H5Dget_space(array.get()), H5Sclose);
  const Hdf5Handle type(H5Dget_type(array.get()), H5Tclose);
  ArrayInfo result;
  const int dims = H5Sget_simple_extent_ndims(space.get());
  CRAM_CHECK(dims >= 0 && type.valid(), state_->code, "cannot read the shape of ", name, " in ", state_->path);
  std::vector<hsize_t> extents(static_cast<std::size_t>(dims));
  H5Sget_simple_extent_dims(space.get(), extents.data(), nullptr);
  result.shape.assign(extents.begin(), extents.end());
  for (const ArrayType candidate :
       {ArrayType::kU16, ArrayType::kU32, ArrayType::kI64, ArrayType::kF32, ArrayType::kF64}) {
    if (H5Tequal(type.get(), stored_type(candidate)) > 0) {
      result.type = candidate;
      return result;
    }
  }
  fail(state_->code, name, " in ", state_->path, " has an unexpected number format");
}

std::int64_t ArrayFileReader::offset(const std::string& name) const {
  const auto lock = hdf5_lock();
  const Hdf5Handle array(H5Dopen2(state_->file.get(), name.c_str(), H5P_DEFAULT), H5Dclose);
  CRAM_CHECK(array.valid(), state_->code, "cannot open ", name, " in ", state_->path);
  const haddr_t at = H5Dget_offset(array.get());
  return at == HADDR_UNDEF ? -1 : static_cast<std::int64_t>(at);
}

void ArrayFileReader::read(const std::string& name, const ArrayInfo& expected, void* data) const {
  read_rows(name, expected, 0, expected.shape.empty() ? 1 : expected.shape[0], data);
}

void ArrayFileReader::read_rows(const std::string& name, const ArrayInfo& expected, std::int64_t first,
                                std::int64_t rows, void* data) const {
  const auto lock = hdf5_lock();
  const ArrayInfo found = info(name);
  CRAM_CHECK(found.type == expected.type && found.shape == expected.shape, state_->code, name, " in ", state_->path,
             " has shape ", shape_text(found.shape), " in ", 8 * array_item_bytes(found.type), " bits, expected ",
             shape_text(expected.shape), " in ", 8 * array_item_bytes(expected.type));
  const Hdf5Handle array(H5Dopen2(state_->file.get(), name.c_str(), H5P_DEFAULT), H5Dclose);
  const bool whole = found.shape.empty() || (first == 0 && rows == found.shape[0]);
  std::vector<hsize_t> counts(found.shape.begin(), found.shape.end()), starts(found.shape.size(), 0);
  if (!whole) {
    starts[0] = static_cast<hsize_t>(first);
    counts[0] = static_cast<hsize_t>(rows);
  }
  const auto dims = static_cast<int>(counts.size());
  const Hdf5Handle in_file(array.valid() ? H5Dget_space(array.get()) : -1, H5Sclose);
  const Hdf5Handle in_memory(H5Screate_simple(dims, counts.data(), nullptr), H5Sclose);
  const bool selected = in_file.valid() && in_memory.valid() &&
                        (whole || H5Sselect_hyperslab(in_file.get(), H5S_SELECT_SET, starts.data(), nullptr,
                                                      counts.data(), nullptr) >= 0);
  CRAM_CHECK(selected && H5Dread(array.get(), native_type(expected.type), in_memory.get(), in_file.get(), H5P_DEFAULT,
                                 data) >= 0,
             state_->code, "reading ", name, " from ", state_->path, " failed");
}

}  // namespace cram
