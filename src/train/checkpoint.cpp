#include "train/checkpoint.h"

#include <torch/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <tuple>

#include "base/digest.h"
#include "base/file_io.h"
#include "base/hdf5_file.h"
#include "base/log.h"
#include "base/options.h"
#include "parallel/agreement.h"

namespace cram {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kMagic = "cram-checkpoint";
constexpr int kFormatVersion = 2;
constexpr const char* kManifest = "manifest.json";
constexpr const char* kManifestDigest = "xxh3_128";  // of the manifest itself, without this entry
constexpr std::string_view kStepPrefix = "step-";
constexpr ExitCode kStorage = ExitCode::kCheckpointStorage;
constexpr ExitCode kInvalid = ExitCode::kNoCheckpoint;

using OwnedRange = ParameterStore::OwnedRange;

// The master and every state of a range, by the name that stands in files.
std::vector<NamedTensor> stored_tensors(const OwnedRange& range) {
  std::vector<NamedTensor> all = {{"master", range.master}};
  all.insert(all.end(), range.states.begin(), range.states.end());
  return all;
}

std::string step_name(std::int64_t step) {
  std::string digits = std::to_string(step);
  return std::string(kStepPrefix) + std::string(digits.size() < 9 ? 9 - digits.size() : 0, '0') + digits;
}

bool is_step_name(const std::string& name) {
  return name.rfind(kStepPrefix, 0) == 0 && name.size() > kStepPrefix.size() &&
         std::all_of(name.begin() + static_cast<std::ptrdiff_t>(kStepPrefix.size()), name.end(),
                     [](char c) { return c >= '0' && c <= '9'; });
}

ArrayInfo array_info(const at::Tensor& tensor) {
  return {tensor.scalar_type() == at::kDouble ? ArrayType::kF64 : ArrayType::kF32, tensor.sizes().vec()};
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

std::string manifest_text(const json& manifest) { return manifest.dump(1) + "\n"; }

void remove_quietly(const fs::path& path) {
  try {
    remove_tree(path);
  } catch (const Error& error) {
    log_warning(error.what());
  }
}

}  // namespace

std::string progress_text(const Progress& progress) { return progress_to_json(progress).dump(); }
Progress parse_progress(const std::string& text) { return progress_from_json(json::parse(text)); }

std::uintmax_t checkpoint_bytes(const ParameterStore& store) {
  std::uintmax_t bytes = 0;
  for (ParamId id = 0; id < store.size(); ++id) {
    for (const OwnedRange& range : store.owned(id)) {
      for (const NamedTensor& stored : stored_tensors(range)) bytes += stored.tensor.nbytes();
    }
  }
  return bytes;
}

std::vector<std::string> CheckpointFolder::committed() const {
  std::vector<std::string> found;
  std::error_code error;
  for (fs::directory_iterator entry(folder_, error), end; !error && entry != end; entry.increment(error)) {
    if (is_step_name(entry->path().filename().string())) found.push_back(entry->path().string());
  }
  CRAM_CHECK(!error || error == std::errc::no_such_file_or_directory, kInvalid, "cannot list ", folder_, ": ",
             error.message());
  // By number, not by text: a run longer than 10^9 steps has a wider name.
  std::sort(found.begin(), found.end(),
            [](const std::string& a, const std::string& b) { return std::pair(a.size(), a) < std::pair(b.size(), b); });
  return found;
}

namespace {

std::string rank_file_name(int rank) {
  const std::string digits = std::to_string(rank);
  return "rank-" + std::string(digits.size() < 5 ? 5 - digits.size() : 0, '0') + digits + ".h5";
}

std::string array_name(const std::string& kind, const std::string& parameter, std::int64_t first_element) {
  return concat("/", kind, "/", parameter, first_element > 0 ? concat("@", first_element) : "");
}

// Writes this rank's tensors; returns the file's entry of the manifest.
json write_rank_file(const fs::path& folder, int rank, const ParameterStore& store) {
  const fs::path path = folder / rank_file_name(rank);
  json tensors = json::array();
  {
    ArrayFileWriter writer(path.string(), kStorage);
    for (ParamId id = 0; id < store.size(); ++id) {
      const ParamSpec& spec = store.spec(id);
      if (!spec.traits.counts) continue;  // the first of two tied copies is written
      for (const OwnedRange& range : store.owned(id)) {
        const bool whole = range.end - range.begin == store.local_numel(id);
        for (const NamedTensor& stored : stored_tensors(range)) {
          at::Tensor host = stored.tensor.cpu().contiguous();
          if (whole) host = host.view(store.local_shape(id));
          writer.write(array_name(stored.name, spec.name, whole ? 0 : range.begin), array_info(host),
                       host.const_data_ptr());
        }
        json entry = {{"name", spec.name},
                      {"shape", spec.global_shape},
                      {"slice", {spec.slice_dim, spec.slice_begin, spec.slice_end, spec.slice_groups}}};
        if (!whole) entry["flat"] = {range.begin, range.end};
        tensors.push_back(std::move(entry));
      }
    }
    writer.close();
  }
  sync_file(path, kStorage);
  return {{"name", path.filename().string()},
          {"bytes", fs::file_size(path)},
          {"xxh3_128", digest_file(path.string())},
          {"tensors", tensors}};
}

}  // namespace

std::uintmax_t CheckpointFolder::save(const ParameterStore& store, const CheckpointInfo& info, std::int64_t keep) {
  const std::unique_ptr<Communicator> alone = make_self_communicator();
  return save(store, info, keep, *alone, /*writes=*/true);
}

std::uintmax_t CheckpointFolder::save(const ParameterStore& store, const CheckpointInfo& info, std::int64_t keep,
                                      Communicator& world, bool writes) {
  const fs::path target = fs::path(folder_) / step_name(info.progress.step);
  std::string temporary;
  on_root(world, [&] {
    temporary = target.string() + temporary_suffix();
    make_folders(folder_, kStorage);
    make_folders(temporary, kStorage);
  });
  temporary = broadcast_text(world, temporary);
  std::string entry, problem;
  try {
    if (writes) entry = write_rank_file(temporary, world.rank(), store).dump();
  } catch (const std::exception& error) {
    problem = error.what();
  }
  const std::vector<std::string> entries = gather_text(world, entry);
  const std::vector<std::string> problems = gather_text(world, problem);
  std::uintmax_t bytes = 0;
  on_root(world, [&] { bytes = commit(temporary, target.string(), entries, problems, store, info, keep); });
  return bytes;
}

std::uintmax_t CheckpointFolder::commit(const std::string& temporary, const std::string& target,
                                        const std::vector<std::string>& entries,
                                        const std::vector<std::string>& problems, const ParameterStore& store,
                                        const CheckpointInfo& info, std::int64_t keep) {
  std::uintmax_t bytes = 0;
  try {
    for (std::size_t rank = 0; rank < problems.size(); ++rank) {
      CRAM_CHECK(problems[rank].empty(), kStorage, problems.size() > 1 ? concat("rank ", rank, ": ") : "",
                 problems[rank]);
    }
    json files = json::array();
    for (const std::string& entry : entries) {
      if (entry.empty()) continue;
      files.push_back(json::parse(entry));
      bytes += files.back().at("bytes").get<std::uintmax_t>();
    }
    json manifest = {{"magic", kMagic},
                     {"version", kFormatVersion},
                     {"progress", progress_to_json(info.progress)},
                     {"settings", info.settings},
                     {"identity", info.identity},
                     {"environment", info.environment},
                     {"precision", precision_name(store.precision())},
                     {"files", files}};
    manifest[kManifestDigest] = digest_text(manifest.dump());
    write_file_atomically(fs::path(temporary) / kManifest, manifest_text(manifest), kStorage);
    // The same step may be saved twice (a run stopped right after an interval save): the older one is equal, keep it.
    if (fs::exists(target)) {
      remove_quietly(temporary);
    } else {
      rename_path(temporary, target, kStorage);
    }
    sync_folder(folder_, kStorage);
  } catch (const Error&) {
    remove_quietly(temporary);
    throw;
  } catch (const std::exception& error) {
    remove_quietly(temporary);
    fail(kStorage, "saving ", target, " failed: ", error.what());
  }
  // Old ones go only now, and only after the new one was read back.
  try {
    (void)verify_checkpoint(target);
  } catch (const Error& error) {
    fail(kStorage, "the checkpoint just written does not verify, older ones are kept: ", error.what());
  }
  const std::vector<std::string> all = committed();
  for (std::size_t i = 0; i + static_cast<std::size_t>(keep) < all.size(); ++i) {
    if (all[i] != target) remove_quietly(all[i]);
  }
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder_, error)) {
    if (is_temporary_name(entry.path().filename().string())) remove_quietly(entry.path());
  }
  return bytes;
}

CheckpointInfo verify_checkpoint(const std::string& step_folder) {
  const fs::path manifest_path = fs::path(step_folder) / kManifest;
  CheckpointInfo info;
  try {
    const std::string content = read_file(manifest_path, kInvalid, 256 << 20);
    json manifest = json::parse(content);
    CRAM_CHECK(manifest.at("magic") == kMagic, kInvalid, manifest_path.string(), " is not a cram checkpoint");
    CRAM_CHECK(manifest.at("version") == kFormatVersion, kInvalid, manifest_path.string(), " has format version ",
               manifest.at("version").dump(), ", this program reads ", kFormatVersion);
    // The digest covers the values; the text must be what was written, to the last byte.
    CRAM_CHECK(manifest_text(manifest) == content, kInvalid, manifest_path.string(),
               " is damaged: its text was changed");
    const std::string expected = manifest.at(kManifestDigest).get<std::string>();
    manifest.erase(kManifestDigest);
    const std::string found = digest_text(manifest.dump());
    CRAM_CHECK(found == expected, kInvalid, manifest_path.string(), " has digest ", found, ", expected ", expected);
    for (const json& file : manifest.at("files")) {
      const fs::path path = fs::path(step_folder) / file.at("name").get<std::string>();
      std::error_code error;
      const std::uintmax_t bytes = fs::file_size(path, error);
      CRAM_CHECK(!error, kInvalid, path.string(), " is missing");
      CRAM_CHECK(bytes == file.at("bytes").get<std::uintmax_t>(), kInvalid, path.string(), " has ", bytes,
                 " bytes, expected ", file.at("bytes").dump());
      const std::string digest = digest_file(path.string());
      CRAM_CHECK(digest == file.at("xxh3_128").get<std::string>(), kInvalid, path.string(), " has digest ", digest,
                 ", expected ", file.at("xxh3_128").get<std::string>());
    }
    info.progress = progress_from_json(manifest.at("progress"));
    const std::string folder_name = fs::path(step_folder).filename().string();
    CRAM_CHECK(!is_step_name(folder_name) || folder_name == step_name(info.progress.step), kInvalid, step_folder,
               " holds step ", info.progress.step, ": it was copied or renamed");
    info.settings = manifest.at("settings").get<std::map<std::string, std::string>>();
    info.identity = manifest.at("identity").get<std::map<std::string, std::string>>();
    info.environment = manifest.at("environment").get<std::map<std::string, std::string>>();
  } catch (const json::exception& error) {
    fail(kInvalid, manifest_path.string(), " is damaged: ", error.what());
  }
  return info;
}

namespace {

// One that may not be read may be good: it is neither damaged nor passed over.
void check_readable(const fs::path& step) {
  const auto check = [](const fs::path& path, int how) {
    CRAM_CHECK(::access(path.c_str(), how) == 0 || errno != EACCES, kInvalid, "cannot read the checkpoint's ",
               path.string(), ": ", std::strerror(errno), "; make it readable and run the same command again");
  };
  check(step, R_OK | X_OK);
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(step, error)) check(entry.path(), R_OK);
}

void set_aside(const std::string& bad, const std::string& reason, const std::string& valid) {
  std::string aside = bad + ".damaged";
  for (int number = 2; fs::exists(aside); ++number) aside = concat(bad, ".damaged-", number);
  try {
    rename_path(bad, aside, kInvalid);
  } catch (const Error& error) {
    fail(kInvalid, bad, " is damaged (", reason, ") and could not be set aside: ", error.what(), "; ", valid,
         " is valid, the run goes on from it once the folder can be written");
  }
  log_warning("checkpoint set aside as ", aside, ": ", reason);
}

}  // namespace

std::optional<CheckpointFolder::Found> CheckpointFolder::newest_valid() {
  const std::vector<std::string> all = committed();
  std::vector<std::pair<std::string, std::string>> damaged;  // path, reason
  for (auto path = all.rbegin(); path != all.rend(); ++path) {
    check_readable(*path);
    std::optional<Found> found;
    try {
      found = Found{*path, verify_checkpoint(*path)};
    } catch (const Error& error) {
      damaged.emplace_back(*path, error.what());
      continue;
    }
    for (const auto& [bad, reason] : damaged) set_aside(bad, reason, *path);
    if (!damaged.empty()) log_warning("going on from the checkpoint before it, ", *path);
    return found;
  }
  if (damaged.empty()) {
    // Set aside earlier, and whatever was valid then is gone: that is no reason to start over silently.
    std::error_code error;
    for (const fs::directory_entry& entry : fs::directory_iterator(folder_, error)) {
      CRAM_CHECK(entry.path().filename().string().find(".damaged") == std::string::npos, kInvalid,
                 "no valid checkpoint in ", folder_, ", only damaged ones such as ", entry.path().string(),
                 "; start again with --fresh (the old run is kept under another name)");
    }
    return std::nullopt;
  }
  std::string reasons;
  for (const auto& [path, reason] : damaged) reasons += "\n  " + path + ": " + reason;
  fail(kInvalid, "no valid checkpoint in ", folder_, " (", damaged.size(), " committed, all damaged):", reasons,
       "\nrestore one of them, or start again with --fresh (the old run is kept under another name)");
}

namespace {

// Where one part of a tensor lies.
struct Piece {
  std::string file;
  ParamSpec spec;                             // name, shape and slice of the part
  std::int64_t flat_begin = 0, flat_end = 0;  // elements of the slice

  [[nodiscard]] std::vector<std::int64_t> slice_shape() const {
    std::vector<std::int64_t> shape = spec.global_shape;
    shape[static_cast<std::size_t>(spec.slice_dim)] = spec.slice_groups * (spec.slice_end - spec.slice_begin);
    return shape;
  }
  [[nodiscard]] std::int64_t slice_numel() const {
    std::int64_t numel = 1;
    for (const std::int64_t extent : slice_shape()) numel *= extent;
    return numel;
  }
  [[nodiscard]] bool is_whole_slice() const { return flat_end - flat_begin == slice_numel(); }
};

std::map<std::string, std::vector<Piece>> read_pieces(const fs::path& manifest_path) {
  std::map<std::string, std::vector<Piece>> pieces;
  try {
    const json manifest = json::parse(read_file(manifest_path, kInvalid));
    for (const json& file : manifest.at("files")) {
      for (const json& tensor : file.at("tensors")) {
        Piece piece;
        piece.file = file.at("name").get<std::string>();
        piece.spec.name = tensor.at("name").get<std::string>();
        piece.spec.global_shape = tensor.at("shape").get<std::vector<std::int64_t>>();
        const auto slice = tensor.at("slice").get<std::vector<std::int64_t>>();
        CRAM_CHECK(slice.size() == 4, kInvalid, manifest_path.string(), ": bad slice of ", piece.spec.name);
        piece.spec.slice_dim = slice[0];
        piece.spec.slice_begin = slice[1];
        piece.spec.slice_end = slice[2];
        piece.spec.slice_groups = slice[3];
        piece.flat_end = piece.slice_numel();
        if (tensor.contains("flat")) {
          piece.flat_begin = tensor.at("flat").at(0).get<std::int64_t>();
          piece.flat_end = tensor.at("flat").at(1).get<std::int64_t>();
          CRAM_CHECK(
              piece.flat_begin >= 0 && piece.flat_begin < piece.flat_end && piece.flat_end <= piece.slice_numel(),
              kInvalid, manifest_path.string(), ": bad range of ", piece.spec.name);
        }
        pieces[piece.spec.name].push_back(piece);
      }
    }
  } catch (const json::exception& error) {
    fail(kInvalid, manifest_path.string(), " is damaged: ", error.what());
  }
  return pieces;
}

using Readers = std::map<std::string, std::unique_ptr<ArrayFileReader>>;

// The full tensor of one kind from all its pieces. Several pieces of one slice (shared out over data ranks) are put
// together before the slice goes to its place.
at::Tensor assemble(const std::vector<Piece>& pieces, const std::string& kind, const ParamSpec& spec,
                    at::ScalarType type, Readers& readers, const std::string& step_folder) {
  using SliceKey = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>;
  struct Slice {
    const Piece* piece = nullptr;
    at::Tensor values, filled;  // flat
  };
  std::map<SliceKey, Slice> slices;
  for (const Piece& piece : pieces) {
    CRAM_CHECK(piece.spec.global_shape == spec.global_shape, kInvalid, step_folder, ": tensor ", spec.name,
               " has shape ", shape_text(piece.spec.global_shape), ", this model expects ",
               shape_text(spec.global_shape));
    Slice& slice =
        slices[{piece.spec.slice_dim, piece.spec.slice_begin, piece.spec.slice_end, piece.spec.slice_groups}];
    if (slice.piece == nullptr) {
      slice.piece = &piece;
      slice.values = at::zeros({piece.slice_numel()}, type);
      slice.filled = at::zeros({piece.slice_numel()}, at::kBool);
    }
    const at::Tensor part = slice.values.slice(0, piece.flat_begin, piece.flat_end);
    ArrayInfo info = array_info(part);
    if (piece.is_whole_slice()) info.shape = piece.slice_shape();
    readers.at(piece.file)->read(array_name(kind, spec.name, piece.flat_begin), info, part.data_ptr());
    slice.filled.slice(0, piece.flat_begin, piece.flat_end).fill_(true);
  }
  const at::Tensor full = at::empty(spec.global_shape, type);
  const at::Tensor filled = at::zeros(spec.global_shape, at::kBool);
  for (const auto& [key, slice] : slices) {
    // Padding of a slice may be missing: it is in no file of another layout either.
    put_slice(full, slice.piece->spec, slice.values.view(slice.piece->slice_shape()));
    put_slice(filled, slice.piece->spec, slice.filled.view(slice.piece->slice_shape()));
  }
  CRAM_CHECK(filled.all().item<bool>(), kInvalid, step_folder, " has only part of the tensor ", spec.name);
  return full;
}

}  // namespace

void load_checkpoint(const std::string& step_folder, ParameterStore& store, const std::set<std::string>& elsewhere) {
  const std::map<std::string, std::vector<Piece>> pieces = read_pieces(fs::path(step_folder) / kManifest);
  Readers readers;
  for (const auto& [name, parts] : pieces) {
    CRAM_CHECK(store.has(name) || elsewhere.count(name) > 0, kInvalid, step_folder, " has the tensor ", name,
               ", which this model has not");
    for (const Piece& piece : parts) {
      std::unique_ptr<ArrayFileReader>& reader = readers[piece.file];
      if (!reader) reader = std::make_unique<ArrayFileReader>((fs::path(step_folder) / piece.file).string(), kInvalid);
    }
  }
  for (ParamId id = 0; id < store.size(); ++id) {
    const ParamSpec& spec = store.spec(id);
    const auto found = pieces.find(spec.name);
    CRAM_CHECK(found != pieces.end(), kInvalid, step_folder, " lacks the tensor ", spec.name,
               ": model.* must describe the model that was saved");
    const auto local_of = [&](const std::string& kind) {
      return take_slice(assemble(found->second, kind, spec, master_type(store.precision()), readers, step_folder),
                        spec);
    };
    store.assign(id, local_of("master"));
    const std::vector<OwnedRange> owned = store.owned(id);
    if (owned.empty()) continue;
    for (std::size_t state = 0; state < owned[0].states.size(); ++state) {
      const at::Tensor flat = local_of(owned[0].states[state].name).reshape({-1});
      for (const OwnedRange& range : owned) range.states[state].tensor.copy_(flat.slice(0, range.begin, range.end));
    }
  }
}

}  // namespace cram
