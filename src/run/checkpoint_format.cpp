#include "run/checkpoint_format.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/digest.h"
#include "base/file_io.h"
#include "base/options.h"

namespace cram {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kMagic = "cram-checkpoint";
constexpr int kVersion = 3;
constexpr int kOldestVersion = 2;  // whole files had digests, all of them stood in the manifest
constexpr const char* kDigest = "xxh3_128";
constexpr std::string_view kStepPrefix = "step-";
constexpr std::uintmax_t kTextLimit = std::uintmax_t{1} << 30;
constexpr ExitCode kInvalid = ExitCode::kNoCheckpoint;

std::string padded(std::int64_t number, std::size_t width) {
  const std::string digits = std::to_string(number);
  return std::string(digits.size() < width ? width - digits.size() : 0, '0') + digits;
}

json progress_to_json(const Progress& p) {
  // Seconds as text with 17 digits: they must come back bit-equal.
  return {{"step", p.step},
          {"consumed_samples", p.consumed_samples},
          {"tokens", p.tokens},
          {"elapsed_s", format_double17(p.elapsed_s)},
          {"excluded_s", format_double17(p.excluded_s)},
          {"skipped", p.skipped},
          {"skipped_in_a_row", p.skipped_in_a_row},
          {"attempt", p.attempt}};
}

Progress progress_from_json(const json& j) {
  Progress p;
  p.step = j.at("step").get<std::int64_t>();
  p.consumed_samples = j.at("consumed_samples").get<std::int64_t>();
  p.tokens = j.at("tokens").get<std::int64_t>();
  p.elapsed_s = parse_double(j.at("elapsed_s").get<std::string>(), "elapsed_s");
  p.excluded_s = parse_double(j.at("excluded_s").get<std::string>(), "excluded_s");
  p.skipped = j.at("skipped").get<std::int64_t>();
  p.skipped_in_a_row = j.at("skipped_in_a_row").get<std::int64_t>();
  p.attempt = j.at("attempt").get<std::int64_t>();
  return p;
}

// The text of a file of a checkpoint; one that is not there is damage.
std::string text_of(const fs::path& path) {
  try {
    return read_file(path, kInvalid, kTextLimit);
  } catch (const Error& error) {
    damaged(error.what());
  }
}

// A JSON object whose entry kDigest is that of the rest, without that entry. The digest covers the values; the text
// must be what was written, to the last byte.
json parse_manifest_text(const std::string& text, const std::string& path) {
  json manifest = json::parse(text);
  if (!manifest.is_object() || manifest.value("magic", json()) != kMagic) {
    damaged(path, " is not a cram checkpoint");
  }
  const json version = manifest.at("version");
  if (manifest.dump(1) + "\n" != text) damaged(path, " is damaged: its text was changed");
  const std::string expected = manifest.at(kDigest).get<std::string>();
  manifest.erase(kDigest);
  const std::string found = digest_text(manifest.dump());
  if (found != expected) damaged(path, " has digest ", found, ", expected ", expected);
  CRAM_CHECK(version.is_number_integer() && version >= kOldestVersion && version <= kVersion, kInvalid, path,
             " has format version ", version.dump(), ", this program reads ", kOldestVersion, " to ", kVersion,
             "; use the program that wrote it");
  return manifest;
}

StoredArray parse_array(const json& entry, const std::string& path) {
  StoredArray array;
  array.spec.name = entry.at("name").get<std::string>();
  array.spec.global_shape = entry.at("shape").get<std::vector<std::int64_t>>();
  const auto slice = entry.at("slice").get<std::vector<std::int64_t>>();
  if (slice.size() != 4) damaged(path, ": bad slice of ", array.spec.name);
  array.spec.slice_dim = slice[0];
  array.spec.slice_begin = slice[1];
  array.spec.slice_end = slice[2];
  array.spec.slice_groups = slice[3];
  const std::vector<std::int64_t>& shape = array.spec.global_shape;
  if (slice[0] < 0 || slice[0] >= static_cast<std::int64_t>(shape.size()) || slice[1] < 0 || slice[2] < slice[1] ||
      slice[3] < 1) {
    damaged(path, ": bad slice of ", array.spec.name);
  }
  array.end = element_count(array.slice_shape());
  if (entry.contains("flat")) {
    const std::int64_t whole = array.end;
    array.begin = entry.at("flat").at(0).get<std::int64_t>();
    array.end = entry.at("flat").at(1).get<std::int64_t>();
    if (array.begin < 0 || array.begin >= array.end || array.end > whole) {
      damaged(path, ": bad range of ", array.spec.name);
    }
  }
  if (entry.contains("pieces")) {
    array.digests = entry.at("pieces").get<std::map<std::string, std::vector<std::string>>>();
    array.offsets = entry.at("offsets").get<std::map<std::string, std::int64_t>>();
  }
  return array;
}

std::vector<StoredArray> parse_arrays(const json& entries, const std::string& path) {
  std::vector<StoredArray> arrays;
  for (const json& entry : entries) arrays.push_back(parse_array(entry, path));
  return arrays;
}

json rank_file_to_json(const RankFile& file) {
  return {{"name", file.name}, {"bytes", file.bytes}, {"index_bytes", file.index_bytes}, {kDigest, file.digest}};
}

RankFile rank_file_from_json(const json& j, int version) {
  RankFile file;
  file.name = j.at("name").get<std::string>();
  file.bytes = j.at("bytes").get<std::uintmax_t>();
  file.digest = j.at(kDigest).get<std::string>();
  if (version > kOldestVersion) file.index_bytes = j.at("index_bytes").get<std::uintmax_t>();
  return file;
}

CheckpointManifest parse_manifest(const std::string& text, const std::string& step_folder) {
  const std::string path = (fs::path(step_folder) / kCheckpointManifest).string();
  CheckpointManifest manifest;
  try {
    const json j = parse_manifest_text(text, path);
    manifest.version = j.at("version").get<int>();
    manifest.info.progress = progress_from_json(j.at("progress"));
    manifest.info.settings = j.at("settings").get<std::map<std::string, std::string>>();
    manifest.info.identity = j.at("identity").get<std::map<std::string, std::string>>();
    manifest.info.environment = j.at("environment").get<std::map<std::string, std::string>>();
    manifest.type = j.at("precision") == precision_name(Precision::kFp64) ? ArrayType::kF64 : ArrayType::kF32;
    for (const json& entry : j.at("files")) {
      manifest.files.push_back(rank_file_from_json(entry, manifest.version));
      if (manifest.version == kOldestVersion) manifest.indexes.push_back({parse_arrays(entry.at("tensors"), path), ""});
    }
  } catch (const json::exception& error) {
    damaged(path, " is damaged: ", error.what());
  }
  const std::string name = fs::path(step_folder).filename().string();
  if (is_step_name(name) && name != step_name(manifest.info.progress.step)) {
    damaged(step_folder, " holds step ", manifest.info.progress.step, ": it was copied or renamed");
  }
  return manifest;
}

}  // namespace

std::string progress_text(const Progress& progress) { return progress_to_json(progress).dump(); }
Progress parse_progress(const std::string& text) { return progress_from_json(json::parse(text)); }

std::string step_name(std::int64_t step) { return std::string(kStepPrefix) + padded(step, 9); }

bool is_step_name(const std::string& name) {
  return name.rfind(kStepPrefix, 0) == 0 && name.size() > kStepPrefix.size() &&
         std::all_of(name.begin() + static_cast<std::ptrdiff_t>(kStepPrefix.size()), name.end(),
                     [](char c) { return c >= '0' && c <= '9'; });
}

std::string rank_file_name(int rank) { return "rank-" + padded(rank, 5) + ".h5"; }
std::string index_name(const std::string& rank_file) { return fs::path(rank_file).replace_extension(".json").string(); }

std::vector<std::int64_t> StoredArray::slice_shape() const {
  std::vector<std::int64_t> shape = spec.global_shape;
  shape[static_cast<std::size_t>(spec.slice_dim)] = spec.slice_groups * (spec.slice_end - spec.slice_begin);
  return shape;
}

std::vector<std::int64_t> StoredArray::shape() const {
  std::vector<std::int64_t> whole = slice_shape();
  if (end - begin == element_count(whole)) return whole;
  return {end - begin};
}

std::string StoredArray::path(const std::string& kind) const {
  return concat("/", kind, "/", spec.name, begin > 0 ? concat("@", begin) : "");
}

Pieces::Pieces(const ArrayInfo& array)
    : row_elements(element_count({array.shape.begin() + (array.shape.empty() ? 0 : 1), array.shape.end()})),
      total_rows(array.shape.empty() ? 1 : array.shape[0]) {
  const std::int64_t row_bytes =
      std::max<std::int64_t>(1, row_elements * static_cast<std::int64_t>(array_item_bytes(array.type)));
  rows = std::max<std::int64_t>(1, kPieceBytes / row_bytes);
}

std::string checkpoint_manifest_text(const CheckpointInfo& info, Precision precision,
                                     const std::vector<RankFile>& files) {
  json manifest = {{"magic", kMagic},
                   {"version", kVersion},
                   {"progress", progress_to_json(info.progress)},
                   {"settings", info.settings},
                   {"identity", info.identity},
                   {"environment", info.environment},
                   {"precision", precision_name(precision)},
                   {"files", json::array()}};
  for (const RankFile& file : files) manifest["files"].push_back(rank_file_to_json(file));
  manifest[kDigest] = digest_text(manifest.dump());
  return manifest.dump(1) + "\n";
}

CheckpointManifest read_checkpoint_manifest(const std::string& step_folder) {
  return parse_manifest(text_of(fs::path(step_folder) / kCheckpointManifest), step_folder);
}

void check_sizes(const std::string& step_folder, const CheckpointManifest& manifest) {
  const auto check = [&](const std::string& name, std::uintmax_t expected) {
    const fs::path path = fs::path(step_folder) / name;
    std::error_code error;
    const std::uintmax_t bytes = fs::file_size(path, error);
    if (error) damaged(path.string(), " is missing");
    if (bytes != expected) damaged(path.string(), " has ", bytes, " bytes, expected ", expected);
  };
  for (const RankFile& file : manifest.files) {
    check(file.name, file.bytes);
    if (manifest.version > kOldestVersion) check(index_name(file.name), file.index_bytes);
  }
}

std::string index_text(const RankIndex& index) {
  json entries = json::array();
  for (const StoredArray& array : index.arrays) {
    const ParamSpec& spec = array.spec;
    json entry = {{"name", spec.name},
                  {"shape", spec.global_shape},
                  {"slice", {spec.slice_dim, spec.slice_begin, spec.slice_end, spec.slice_groups}},
                  {"offsets", array.offsets},
                  {"pieces", array.digests}};
    if (array.end - array.begin != element_count(array.slice_shape())) entry["flat"] = {array.begin, array.end};
    entries.push_back(std::move(entry));
  }
  return json({{"frame", index.frame}, {"arrays", entries}}).dump() + "\n";
}

std::string rank_file_text(const RankFile& file) { return rank_file_to_json(file).dump(); }
RankFile parse_rank_file(const std::string& text) { return rank_file_from_json(json::parse(text), kVersion); }

std::string read_catalogue(const std::string& step_folder) {
  const std::string text = text_of(fs::path(step_folder) / kCheckpointManifest);
  const CheckpointManifest manifest = parse_manifest(text, step_folder);
  check_sizes(step_folder, manifest);
  json texts = {text};
  if (manifest.version == kOldestVersion) return texts.dump();
  for (const RankFile& file : manifest.files) {
    const fs::path path = fs::path(step_folder) / index_name(file.name);
    texts.push_back(text_of(path));
    const std::string digest = digest_text(texts.back().get_ref<const std::string&>());
    if (digest != file.digest) damaged(path.string(), " has digest ", digest, ", expected ", file.digest);
  }
  return texts.dump();
}

CheckpointManifest parse_catalogue(const std::string& text, const std::string& step_folder) {
  const json texts = json::parse(text);
  CheckpointManifest manifest = parse_manifest(texts.at(0).get<std::string>(), step_folder);
  if (manifest.version == kOldestVersion) return manifest;
  for (std::size_t i = 0; i < manifest.files.size(); ++i) {
    const std::string path = (fs::path(step_folder) / index_name(manifest.files[i].name)).string();
    try {
      const json index = json::parse(texts.at(i + 1).get_ref<const std::string&>());
      manifest.indexes.push_back({parse_arrays(index.at("arrays"), path), index.at("frame").get<std::string>()});
    } catch (const json::exception& error) {
      damaged(path, " is damaged: ", error.what());
    }
  }
  return manifest;
}

std::string frame_digest(const std::string& path, const RankIndex& index, ArrayType type) {
  std::map<std::int64_t, std::int64_t> numbers;  // first byte -> bytes
  for (const StoredArray& array : index.arrays) {
    const std::int64_t bytes = (array.end - array.begin) * static_cast<std::int64_t>(array_item_bytes(type));
    for (const auto& [kind, offset] : array.offsets) {
      if (offset >= 0) numbers[offset] = bytes;
    }
  }
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const std::int64_t size = file ? static_cast<std::int64_t>(file.tellg()) : -1;
  numbers[std::max<std::int64_t>(0, size)] = 0;
  Digest digest;
  std::vector<char> gap;
  std::int64_t at = 0;
  for (const auto& [begin, bytes] : numbers) {
    if (begin < at || begin + bytes > size) damaged(path, " has ", size, " bytes, its index speaks of others");
    gap.resize(static_cast<std::size_t>(begin - at));
    file.seekg(at);
    if (!file.read(gap.data(), begin - at)) damaged("reading ", path, " failed at byte ", at);
    digest.update(gap.data(), gap.size());
    at = begin + bytes;
  }
  return digest.hex();
}

namespace {

ArrayFileReader open_checked(const std::string& path, const RankIndex& index, ArrayType type) {
  if (!index.frame.empty()) {
    const std::string found = frame_digest(path, index, type);
    if (found != index.frame) damaged(path, " has frame digest ", found, ", expected ", index.frame);
  }
  try {
    return ArrayFileReader(path, kInvalid);
  } catch (const Error& error) {
    damaged(error.what());
  }
}

}  // namespace

PieceReader::PieceReader(const std::string& path, const RankIndex& index, ArrayType type)
    : path_(path), type_(type), file_(open_checked(path, index, type)) {}

const char* PieceReader::read(const StoredArray& array, const std::string& kind, std::int64_t piece) {
  const ArrayInfo info{type_, array.shape()};
  const Pieces pieces(info);
  const std::string name = array.path(kind);
  const std::int64_t rows = pieces.rows_of(piece);
  const auto bytes = static_cast<std::size_t>(rows * pieces.row_elements) * array_item_bytes(type_);
  buffer_.resize(bytes);
  const auto known = array.digests.find(kind);
  // Version 2 has no list of kinds, and its files were checked as a whole.
  CRAM_CHECK(array.digests.empty() ? file_.has(name) : known != array.digests.end(), kInvalid, path_, " has no ", kind,
             " of ", array.spec.name, ": the run was trained by another optimizer");
  try {
    file_.read_rows(name, info, pieces.first_row(piece), rows, buffer_.data());
  } catch (const Error& error) {
    damaged(error.what());
  }
  bytes_read_ += bytes;
  if (array.digests.empty()) return buffer_.data();
  const std::vector<std::string>& digests = known->second;
  if (static_cast<std::int64_t>(digests.size()) != pieces.count()) {
    damaged(path_, ": the index has ", digests.size(), " pieces of ", name, ", expected ", pieces.count());
  }
  const std::string digest = digest_bytes(buffer_.data(), bytes);
  const std::string& expected = digests[static_cast<std::size_t>(piece)];
  if (digest != expected) {
    damaged(path_, ": piece ", piece + 1, " of ", pieces.count(), " of ", name, " has digest ", digest, ", expected ",
            expected);
  }
  return buffer_.data();
}

}  // namespace cram
