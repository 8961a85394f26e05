#include "base/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "base/file_io.h"

namespace cram {
namespace {

constexpr std::uint64_t kLargestHeader = 100'000'000;

// Fills entries and metadata from the header's events. The tree is never built: nlohmann's own tree keeps the last of
// two equal keys and overflows the stack on deep nesting.
class HeaderHandler : public nlohmann::json_sax<nlohmann::json> {
 public:
  std::map<std::string, SafetensorsEntry> entries;
  std::map<std::string, std::string> metadata;
  std::string problem;

  bool null() override { return refuse("null value"); }
  bool boolean(bool) override { return refuse("boolean value"); }
  bool number_integer(number_integer_t) override { return refuse("negative number"); }
  bool number_unsigned(number_unsigned_t value) override {
    if (array_ == nullptr) return refuse("number outside shape and data_offsets");
    array_->push_back(value);
    return true;
  }
  bool number_float(number_float_t, const string_t&) override { return refuse("fractional number"); }
  bool string(string_t& value) override {
    if (depth_ == 2 && in_metadata_) {
      metadata[key_] = value;
      return true;
    }
    if (depth_ == 2 && key_ == "dtype") {
      dtype_ = value;
      return true;
    }
    return refuse("text outside dtype and __metadata__");
  }
  bool binary(binary_t&) override { return refuse("binary value"); }
  bool start_object(std::size_t) override {
    if (depth_ >= 2 || array_ != nullptr) return refuse("nesting deeper than the format has");
    ++depth_;
    keys_seen_.emplace_back();
    return true;
  }
  bool key(string_t& value) override {
    if (!keys_seen_.back().insert(value).second) return refuse(concat("duplicate key ", value));
    key_ = value;
    if (depth_ == 1) {
      name_ = value;
      in_metadata_ = value == "__metadata__";
      dtype_.clear();
      shape_.reset();
      offsets_.reset();
    } else if (!in_metadata_ && value != "dtype" && value != "shape" && value != "data_offsets") {
      return refuse(concat("unknown field ", value));
    }
    return true;
  }
  bool end_object() override {
    if (depth_ == 2 && !in_metadata_) {
      if (dtype_.empty() || !shape_ || !offsets_) return refuse(concat(name_, " lacks dtype, shape or data_offsets"));
      if (offsets_->size() != 2) return refuse(concat(name_, " has ", offsets_->size(), " data_offsets, expected 2"));
      SafetensorsEntry entry;
      entry.dtype = dtype_;
      entry.begin = (*offsets_)[0];
      entry.end = (*offsets_)[1];
      for (const std::uint64_t extent : *shape_) {
        if (extent > std::uint64_t{std::numeric_limits<std::int64_t>::max()})
          return refuse(concat(name_, ": huge shape"));
        entry.shape.push_back(static_cast<std::int64_t>(extent));
      }
      entries[name_] = entry;
    }
    --depth_;
    keys_seen_.pop_back();
    return true;
  }
  bool start_array(std::size_t) override {
    if (depth_ != 2 || in_metadata_ || array_ != nullptr || (key_ != "shape" && key_ != "data_offsets")) {
      return refuse("array outside shape and data_offsets");
    }
    array_ = &(key_ == "shape" ? shape_ : offsets_).emplace();
    return true;
  }
  bool end_array() override {
    array_ = nullptr;
    return true;
  }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
    return refuse(concat("not valid JSON at byte ", position));
  }

 private:
  bool refuse(const std::string& why) {
    if (problem.empty()) problem = why;
    return false;
  }
  int depth_ = 0;
  bool in_metadata_ = false;
  std::string key_, name_, dtype_;
  std::optional<std::vector<std::uint64_t>> shape_, offsets_;
  std::vector<std::uint64_t>* array_ = nullptr;
  std::vector<std::set<std::string>> keys_seen_;
};

// Bytes of shape x dtype, or nothing when that does not fit.
std::optional<std::size_t> expected_bytes(const SafetensorsEntry& entry) {
  std::size_t bytes = safetensors_item_bytes(entry.dtype);
  if (bytes == 0) return std::nullopt;
  for (const std::int64_t extent : entry.shape) {
    if (__builtin_mul_overflow(bytes, static_cast<std::size_t>(extent), &bytes)) return std::nullopt;
  }
  return bytes;
}

}  // namespace

struct SafetensorsFile::Mapping {
  const std::byte* start = nullptr;
  std::size_t bytes = 0;
  Mapping() = default;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    if (start != nullptr) ::munmap(const_cast<std::byte*>(start), bytes);
  }
};

SafetensorsFile::SafetensorsFile() : mapping_(std::make_unique<Mapping>()) {}
SafetensorsFile::SafetensorsFile(SafetensorsFile&&) noexcept = default;
SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&&) noexcept = default;
SafetensorsFile::~SafetensorsFile() = default;

std::size_t safetensors_item_bytes(const std::string& dtype) {
  static const std::map<std::string, std::size_t> kBytes = {{"F64", 8}, {"F32", 4}, {"F16", 2}, {"BF16", 2},
                                                            {"I64", 8}, {"I32", 4}, {"I16", 2}, {"I8", 1},
                                                            {"U8", 1},  {"BOOL", 1}};
  const auto found = kBytes.find(dtype);
  return found == kBytes.end() ? 0 : found->second;
}

SafetensorsFile SafetensorsFile::open(const std::string& path, ExitCode code) {
  SafetensorsFile file;
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  CRAM_CHECK(fd >= 0, code, "cannot read ", path, ": ", std::strerror(errno));
  struct stat info {};
  const bool known = ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
  file.mapping_->bytes = known ? static_cast<std::size_t>(info.st_size) : 0;
  void* start =
      known && info.st_size >= 8 ? ::mmap(nullptr, file.mapping_->bytes, PROT_READ, MAP_PRIVATE, fd, 0) : MAP_FAILED;
  ::close(fd);
  CRAM_CHECK(start != MAP_FAILED, code, path, " is not a safetensors file: ", file.mapping_->bytes,
             " bytes, expected at least 8");
  file.mapping_->start = static_cast<const std::byte*>(start);

  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, file.mapping_->start, 8);
  CRAM_CHECK(header_bytes <= kLargestHeader && header_bytes <= file.mapping_->bytes - 8, code, path,
             " is not a safetensors file: a header of ", header_bytes, " bytes in a file of ", file.mapping_->bytes);
  const auto* header = reinterpret_cast<const char*>(file.mapping_->start + 8);
  CRAM_CHECK(header_bytes > 0 && header[0] == '{', code, path, ": the safetensors header does not start with {");
  // The JSON parser takes a NUL for the end of its input and would not see what follows.
  CRAM_CHECK(std::memchr(header, '\0', header_bytes) == nullptr, code, path,
             ": the safetensors header holds a NUL byte");
  HeaderHandler handler;
  const bool parsed = nlohmann::json::sax_parse(header, header + header_bytes, &handler);
  CRAM_CHECK(parsed && handler.problem.empty(), code, path, ": bad safetensors header: ", handler.problem);
  file.entries_ = std::move(handler.entries);
  file.metadata_ = std::move(handler.metadata);
  file.data_start_ = 8 + static_cast<std::size_t>(header_bytes);

  std::vector<std::pair<const std::string*, const SafetensorsEntry*>> by_offset;
  for (const auto& [name, entry] : file.entries_) by_offset.emplace_back(&name, &entry);
  std::sort(by_offset.begin(), by_offset.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second->begin, a.second->end) < std::pair(b.second->begin, b.second->end);
  });
  std::size_t cursor = 0;
  for (const auto& [name, entry] : by_offset) {
    const std::optional<std::size_t> bytes = expected_bytes(*entry);
    CRAM_CHECK(bytes, code, path, ": tensor ", *name, " has dtype ", entry->dtype, " or a shape that cannot be");
    CRAM_CHECK(entry->begin == cursor && entry->end >= entry->begin && entry->end - entry->begin == *bytes, code, path,
               ": tensor ", *name, " lies at bytes ", entry->begin, " to ", entry->end, ", expected ", cursor, " to ",
               cursor + *bytes);
    cursor = entry->end;
  }
  CRAM_CHECK(cursor == file.mapping_->bytes - file.data_start_, code, path, " has ",
             file.mapping_->bytes - file.data_start_, " bytes of tensors, the header accounts for ", cursor);
  return file;
}

const SafetensorsEntry* SafetensorsFile::find(const std::string& name) const {
  const auto found = entries_.find(name);
  return found == entries_.end() ? nullptr : &found->second;
}

const std::byte* SafetensorsFile::data(const SafetensorsEntry& entry) const {
  return mapping_->start + data_start_ + entry.begin;
}

void write_safetensors(const std::string& path, const std::vector<SafetensorsItem>& items,
                       const std::map<std::string, std::string>& metadata, ExitCode code) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::size_t cursor = 0;
  for (const SafetensorsItem& item : items) {
    SafetensorsEntry entry{item.dtype, item.shape, 0, 0};
    const std::optional<std::size_t> bytes = expected_bytes(entry);
    CRAM_CHECK(bytes && !header.contains(item.name), code, "cannot write tensor ", item.name, ": unknown dtype ",
               item.dtype, " or written twice");
    header[item.name] = {{"dtype", item.dtype}, {"shape", item.shape}, {"data_offsets", {cursor, cursor + *bytes}}};
    cursor += *bytes;
  }
  std::string start = header.dump();
  start.append((8 - start.size() % 8) % 8, ' ');  // aligns the tensors
  const std::uint64_t header_bytes = start.size();
  std::string prefix(8, '\0');
  std::memcpy(prefix.data(), &header_bytes, 8);

  const std::string temporary = path + temporary_suffix();
  std::FILE* file = std::fopen(temporary.c_str(), "wbx");
  CRAM_CHECK(file != nullptr, code, "cannot create ", temporary, ": ", std::strerror(errno));
  bool good =
      std::fwrite(prefix.data(), 1, 8, file) == 8 && std::fwrite(start.data(), 1, start.size(), file) == start.size();
  for (const SafetensorsItem& item : items) {
    const std::size_t bytes = *expected_bytes({item.dtype, item.shape, 0, 0});
    good = good && (bytes == 0 || std::fwrite(item.data, 1, bytes, file) == bytes);
  }
  good = std::fflush(file) == 0 && good;
  good = ::fsync(::fileno(file)) == 0 && good;
  const int saved_errno = errno;
  good = std::fclose(file) == 0 && good;
  if (!good) {
    ::unlink(temporary.c_str());
    fail(code, "writing ", path, " (", cursor + 8 + start.size(), " bytes) failed: ", std::strerror(saved_errno));
  }
  try {
    rename_path(temporary, path, code);
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  sync_folder(folder.empty() ? "." : folder, code);
}

}  // namespace cram
