#include "data/shard.h"

#include <hdf5.h>

#include <algorithm>
#include <array>
#include <vector>

#include "base/check.h"
#include "base/digest.h"
#include "base/file_io.h"
#include "base/hdf5_file.h"
#include "base/hdf5_handle.h"

namespace cram {
namespace {

constexpr const char* kMagic = "cram-shard";
constexpr const char* kDataset = "input_ids";

void check(herr_t status, const std::string& what) { CRAM_CHECK(status >= 0, ExitCode::kData, "HDF5 failed: ", what); }

// Every identifier goes through here, so a failed call cannot be overlooked.
Hdf5Handle checked(hid_t id, Hdf5Handle::Close closer, const std::string& what) {
  CRAM_CHECK(id >= 0, ExitCode::kData, "HDF5 failed: ", what);
  return {id, closer};
}

void write_integer(hid_t file, const char* name, std::int64_t value) {
  const Hdf5Handle space = checked(H5Screate(H5S_SCALAR), H5Sclose, name);
  const Hdf5Handle attribute =
      checked(H5Acreate2(file, name, H5T_STD_I64LE, space.get(), H5P_DEFAULT, H5P_DEFAULT), H5Aclose, name);
  check(H5Awrite(attribute.get(), H5T_NATIVE_INT64, &value), name);
}

void write_text(hid_t file, const char* name, const std::string& value) {
  const Hdf5Handle type = checked(H5Tcopy(H5T_C_S1), H5Tclose, name);
  check(H5Tset_size(type.get(), value.size() + 1), name);
  const Hdf5Handle space = checked(H5Screate(H5S_SCALAR), H5Sclose, name);
  const Hdf5Handle attribute =
      checked(H5Acreate2(file, name, type.get(), space.get(), H5P_DEFAULT, H5P_DEFAULT), H5Aclose, name);
  check(H5Awrite(attribute.get(), type.get(), value.c_str()), name);
}

std::int64_t read_integer(hid_t file, const char* name) {
  const Hdf5Handle attribute = checked(H5Aopen(file, name, H5P_DEFAULT), H5Aclose, concat("no attribute ", name));
  const Hdf5Handle space = checked(H5Aget_space(attribute.get()), H5Sclose, name);
  CRAM_CHECK(H5Sget_simple_extent_npoints(space.get()) == 1, ExitCode::kData, "attribute ", name,
             " is no single number");
  std::int64_t value = 0;
  check(H5Aread(attribute.get(), H5T_NATIVE_INT64, &value), concat("attribute ", name));
  return value;
}

std::string read_text(hid_t file, const char* name) {
  constexpr std::size_t kLimit = 4096;
  const Hdf5Handle attribute = checked(H5Aopen(file, name, H5P_DEFAULT), H5Aclose, concat("no attribute ", name));
  const Hdf5Handle space = checked(H5Aget_space(attribute.get()), H5Sclose, name);
  const Hdf5Handle type = checked(H5Aget_type(attribute.get()), H5Tclose, name);
  const std::size_t size = H5Tget_size(type.get());
  CRAM_CHECK(H5Tget_class(type.get()) == H5T_STRING && H5Tis_variable_str(type.get()) == 0 && size > 0 &&
                 size <= kLimit && H5Sget_simple_extent_npoints(space.get()) == 1,
             ExitCode::kData, "attribute ", name, " is no short text");
  std::string value(size, '\0');
  check(H5Aread(attribute.get(), type.get(), value.data()), concat("attribute ", name));
  value.resize(std::min(size, value.find('\0')));
  return value;
}

void write_header(hid_t file, const ShardHeader& header) {
  write_text(file, "magic", kMagic);
  write_integer(file, "version", kShardVersion);
  write_integer(file, "seq_length", header.seq_length);
  write_integer(file, "vocab_size", header.vocab_size);
  write_integer(file, "rows", header.rows);
  write_integer(file, "tokens", header.rows * header.seq_length);
  write_integer(file, "shard_index", header.shard_index);
  write_text(file, "split", header.split);
  write_text(file, "order", header.order);
  write_text(file, "tokenizer_digest", header.tokenizer_digest);
}

ShardHeader read_header(hid_t file) {
  const std::string magic = read_text(file, "magic");
  CRAM_CHECK(magic == kMagic, ExitCode::kData, "magic is '", magic, "', expected '", kMagic, "'");
  const std::int64_t version = read_integer(file, "version");
  CRAM_CHECK(version == kShardVersion, ExitCode::kData, "shard version ", version, ", this program reads version ",
             kShardVersion, ": prepare the data again");
  ShardHeader header;
  header.seq_length = read_integer(file, "seq_length");
  header.vocab_size = read_integer(file, "vocab_size");
  header.rows = read_integer(file, "rows");
  header.shard_index = read_integer(file, "shard_index");
  header.split = read_text(file, "split");
  header.order = read_text(file, "order");
  header.tokenizer_digest = read_text(file, "tokenizer_digest");
  CRAM_CHECK(header.seq_length > 0 && header.rows >= 0 && header.vocab_size > 0, ExitCode::kData,
             "the header has seq_length ", header.seq_length, ", rows ", header.rows, ", vocab_size ",
             header.vocab_size);
  return header;
}

using Extent = std::array<hsize_t, 2>;

Extent extent(std::int64_t rows, std::int64_t seq_length) {
  return {static_cast<hsize_t>(rows), static_cast<hsize_t>(seq_length)};
}

/// The part [first, first+count) of a dataset's file space.
void select_rows(hid_t space, std::int64_t first, std::int64_t count, std::int64_t seq_length) {
  const Extent start = extent(first, 0);
  const Extent size = extent(count, seq_length);
  check(H5Sselect_hyperslab(space, H5S_SELECT_SET, start.data(), nullptr, size.data(), nullptr), "selecting rows");
}

constexpr std::size_t kImageStep = std::size_t{1} << 20U;
constexpr const char* kImageName = "shard in memory";

/// The bytes of the shard file, made in memory: HDF5 1.10 dies of a signal when a file it writes meets a full disk, and
/// our own writer does not. Sets the digest of the ids that went in.
std::string make_image(const ShardHeader& header, const FillRows& fill_rows, std::string& ids_digest) {
  const Hdf5Handle access = hdf5_file_access();
  check(H5Pset_fapl_core(access.get(), kImageStep, /*backing_store=*/false), "memory driver");
  const Hdf5Handle file =
      checked(H5Fcreate(kImageName, H5F_ACC_TRUNC, H5P_DEFAULT, access.get()), H5Fclose, kImageName);
  write_header(file.get(), header);

  const Hdf5Handle creation = checked(H5Pcreate(H5P_DATASET_CREATE), H5Pclose, "dataset properties");
  const Extent chunk = extent(kShardBlockRows, header.seq_length);
  check(H5Pset_chunk(creation.get(), 2, chunk.data()), "chunks");
  check(H5Pset_fletcher32(creation.get()), "checksum");
  check(H5Pset_obj_track_times(creation.get(), false), "times");  // or two runs would differ by their clock

  // The row dimension is unlimited on paper only: a chunk may not be larger than a fixed dimension.
  const Extent size = extent(header.rows, header.seq_length);
  const Extent maximum{H5S_UNLIMITED, size[1]};
  const Hdf5Handle space = checked(H5Screate_simple(2, size.data(), maximum.data()), H5Sclose, "dataset space");
  const hid_t stored = header.vocab_size > 65536 ? H5T_STD_U32LE : H5T_STD_U16LE;
  Hdf5Handle dataset =
      checked(H5Dcreate2(file.get(), kDataset, stored, space.get(), H5P_DEFAULT, creation.get(), H5P_DEFAULT), H5Dclose,
              "creating input_ids");

  Digest digest;
  std::vector<std::uint32_t> block;
  for (std::int64_t first = 0; first < header.rows; first += kShardBlockRows) {
    const std::int64_t count = std::min(kShardBlockRows, header.rows - first);
    block.resize(static_cast<std::size_t>(count * header.seq_length));
    fill_rows(first, count, block.data());
    for (const std::uint32_t id : block) {
      CRAM_CHECK(id < header.vocab_size, ExitCode::kData, "id ", id, " in a vocabulary of ", header.vocab_size);
    }
    digest.update(block.data(), block.size() * sizeof block[0]);
    select_rows(space.get(), first, count, header.seq_length);
    const Extent block_size = extent(count, header.seq_length);
    const Hdf5Handle memory = checked(H5Screate_simple(2, block_size.data(), nullptr), H5Sclose, "block space");
    check(H5Dwrite(dataset.get(), H5T_NATIVE_UINT32, memory.get(), space.get(), H5P_DEFAULT, block.data()),
          "writing rows");
  }
  ids_digest = digest.hex();
  check(dataset.close(), "closing input_ids");
  check(H5Fflush(file.get(), H5F_SCOPE_GLOBAL), "flushing");
  const ssize_t bytes = H5Fget_file_image(file.get(), nullptr, 0);
  CRAM_CHECK(bytes > 0, ExitCode::kData, "HDF5 failed: size of the file image");
  std::string image(static_cast<std::size_t>(bytes), '\0');
  CRAM_CHECK(H5Fget_file_image(file.get(), image.data(), image.size()) == bytes, ExitCode::kData,
             "HDF5 failed: copying the file image");
  return image;
}

}  // namespace

struct ShardReader::State {
  State(const std::string& shard_path, const Hdf5Handle& access)
      : path(shard_path),
        file(checked(H5Fopen(path.c_str(), H5F_ACC_RDONLY, access.get()), H5Fclose,
                     "it is no HDF5 file or not readable")),
        header(read_header(file.get())),
        dataset(checked(H5Dopen2(file.get(), kDataset, H5P_DEFAULT), H5Dclose, "no dataset input_ids")),
        space(checked(H5Dget_space(dataset.get()), H5Sclose, "dataset space")) {}

  std::string path;
  Hdf5Handle file;
  ShardHeader header;
  Hdf5Handle dataset;
  Hdf5Handle space;

  void check_dataset() const {
    Extent size{};
    CRAM_CHECK(H5Sget_simple_extent_ndims(space.get()) == 2 &&
                   H5Sget_simple_extent_dims(space.get(), size.data(), nullptr) == 2 &&
                   size == extent(header.rows, header.seq_length),
               ExitCode::kData, "input_ids is ", size[0], "x", size[1], ", the header says ", header.rows, "x",
               header.seq_length);
    const Hdf5Handle type = checked(H5Dget_type(dataset.get()), H5Tclose, "dataset type");
    const std::size_t width = header.vocab_size > 65536 ? 4 : 2;
    CRAM_CHECK(H5Tget_class(type.get()) == H5T_INTEGER && H5Tget_sign(type.get()) == H5T_SGN_NONE &&
                   H5Tget_size(type.get()) == width,
               ExitCode::kData, "input_ids is not uint", 8 * width);
  }

  void read(std::int64_t first, std::int64_t count, std::uint32_t* out) const {
    CRAM_CHECK(first >= 0 && count >= 0 && first + count <= header.rows, ExitCode::kData, "rows [", first, ", ",
               first + count, ") of ", path, ", which has ", header.rows);
    if (count == 0) return;
    const auto lock = hdf5_lock();
    set_up_hdf5();
    select_rows(space.get(), first, count, header.seq_length);
    const Extent size = extent(count, header.seq_length);
    const Hdf5Handle memory = checked(H5Screate_simple(2, size.data(), nullptr), H5Sclose, "block space");
    check(H5Dread(dataset.get(), H5T_NATIVE_UINT32, memory.get(), space.get(), H5P_DEFAULT, out),
          concat("reading rows [", first, ", ", first + count, ") of ", path, ": the checksum or the file is bad"));
    const std::uint32_t largest = *std::max_element(out, out + count * header.seq_length);
    CRAM_CHECK(largest < header.vocab_size, ExitCode::kData, path, " has id ", largest, " in a vocabulary of ",
               header.vocab_size);
  }

  /// The digest of all ids, as the writer counted them.
  [[nodiscard]] std::string ids_digest() const {
    Digest digest;
    std::vector<std::uint32_t> block;
    for (std::int64_t first = 0; first < header.rows; first += kShardBlockRows) {
      const std::int64_t count = std::min(kShardBlockRows, header.rows - first);
      block.resize(static_cast<std::size_t>(count * header.seq_length));
      read(first, count, block.data());
      digest.update(block.data(), block.size() * sizeof block[0]);
    }
    return digest.hex();
  }
};

ShardFile write_shard(const std::filesystem::path& path, const ShardHeader& header, const FillRows& fill_rows) {
  const auto lock = hdf5_lock();
  std::string ids_digest;
  const std::string image = make_image(header, fill_rows, ids_digest);
  {
    const Hdf5Handle access = hdf5_file_access();
    check(H5Pset_fapl_core(access.get(), kImageStep, /*backing_store=*/false), "memory driver");
    check(H5Pset_file_image(access.get(), const_cast<char*>(image.data()), image.size()), "file image");  // is copied
    const ShardReader::State read_back(kImageName, access);
    CRAM_CHECK(read_back.header == header && read_back.ids_digest() == ids_digest, ExitCode::kData,
               "the rows read back from the image of ", path.string(), " are not those written");
  }
  const ShardFile result{path.filename().string(), header.rows, static_cast<std::int64_t>(image.size()),
                         digest_text(image)};
  write_file_atomically(path, image, ExitCode::kData);
  const std::string found = digest_file(path.string());
  CRAM_CHECK(found == result.digest, ExitCode::kData, path.string(), " reads back with digest ", found,
             ", written was ", result.digest, ": the storage is faulty");
  return result;
}

ShardReader::ShardReader(std::unique_ptr<State> state) noexcept : state_(std::move(state)) {}
ShardReader::ShardReader(ShardReader&&) noexcept = default;
ShardReader& ShardReader::operator=(ShardReader&&) noexcept = default;
ShardReader::~ShardReader() = default;

ShardReader ShardReader::open(const std::filesystem::path& path) {
  const auto lock = hdf5_lock();
  const Hdf5Handle access = hdf5_file_access();
  try {
    auto state = std::make_unique<State>(path.string(), access);
    state->check_dataset();
    return ShardReader(std::move(state));
  } catch (const Error& error) {
    fail(ExitCode::kData, "bad shard ", path.string(), ": ", error.what());
  }
}

const ShardHeader& ShardReader::header() const { return state_->header; }

void ShardReader::read(std::int64_t first, std::int64_t count, std::uint32_t* out) const {
  state_->read(first, count, out);
}

std::string hdf5_version() {
  const auto lock = hdf5_lock();
  set_up_hdf5();  // asking for the version starts the library
  unsigned major = 0;
  unsigned minor = 0;
  unsigned release = 0;
  H5get_libversion(&major, &minor, &release);
  return concat("HDF5 ", major, ".", minor, ".", release);
}

}  // namespace cram
