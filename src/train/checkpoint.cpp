#include "train/checkpoint.h"

#include <torch/types.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/digest.h"
#include "base/file_io.h"
#include "base/hdf5_file.h"
#include "base/log.h"
#include "base/options.h"

namespace cram {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kMagic = "cram-checkpoint";
constexpr int kFormatVersion = 1;
constexpr const char* kManifest = "manifest.json";
constexpr const char* kManifestDigest = "xxh3_128";  // of the manifest itself, without this entry
constexpr const char* kRankFile = "rank-00000.h5";
constexpr std::string_view kStepPrefix = "step-";
constexpr ExitCode kStorage = ExitCode::kCheckpointStorage;
constexpr ExitCode kInvalid = ExitCode::kNoCheckpoint;

struct StateKind {
  const char* name;
  const at::Tensor& (ParameterStore::*tensor)(ParamId) const;
};
constexpr StateKind kStateKinds[] = {{"master", &ParameterStore::master},
                                     {"exp_avg", &ParameterStore::exp_avg},
                                     {"exp_avg_sq", &ParameterStore::exp_avg_sq}};

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

std::uintmax_t checkpoint_bytes(const ParameterStore& store) {
  std::uintmax_t bytes = 0;
  for (ParamId id = 0; id < store.size(); ++id) {
    bytes += 3 * static_cast<std::uintmax_t>(store.local_numel(id)) * store.master(id).element_size();
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

std::uintmax_t CheckpointFolder::save(const ParameterStore& store, const CheckpointInfo& info, std::int64_t keep) {
  make_folders(folder_, kStorage);
  const fs::path target = fs::path(folder_) / step_name(info.progress.step);
  const fs::path temporary = target.string() + temporary_suffix();
  std::uintmax_t bytes = 0;
  try {
    make_folders(temporary, kStorage);
    const fs::path rank_file = temporary / kRankFile;
    json parameters = json::array();
    {
      ArrayFileWriter writer(rank_file.string(), kStorage);
      for (ParamId id = 0; id < store.size(); ++id) {
        const ParamSpec& spec = store.spec(id);
        for (const StateKind& kind : kStateKinds) {
          const at::Tensor host = (store.*kind.tensor)(id).cpu().contiguous();
          writer.write(concat("/", kind.name, "/", spec.name), array_info(host), host.const_data_ptr());
        }
        parameters.push_back({{"name", spec.name},
                              {"shape", spec.global_shape},
                              {"file", kRankFile},
                              {"slice", {spec.slice_dim, spec.slice_begin, spec.slice_end}}});
      }
      writer.close();
    }
    sync_file(rank_file, kStorage);
    bytes = fs::file_size(rank_file);
    json manifest = {
        {"magic", kMagic},
        {"version", kFormatVersion},
        {"progress", progress_to_json(info.progress)},
        {"settings", info.settings},
        {"identity", info.identity},
        {"environment", info.environment},
        {"precision", precision_name(store.precision())},
        {"layout", {{"data", 1}, {"tensor", 1}, {"pipeline", 1}}},
        {"files", {{{"name", kRankFile}, {"bytes", bytes}, {"xxh3_128", digest_file(rank_file.string())}}}},
        {"parameters", parameters}};
    manifest[kManifestDigest] = digest_text(manifest.dump());
    write_file_atomically(temporary / kManifest, manifest_text(manifest), kStorage);
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
    fail(kStorage, "saving ", target.string(), " failed: ", error.what());
  }
  // Old ones go only now, and only after the new one was read back.
  try {
    (void)verify_checkpoint(target.string());
  } catch (const Error& error) {
    fail(kStorage, "the checkpoint just written does not verify, older ones are kept: ", error.what());
  }
  const std::vector<std::string> all = committed();
  for (std::size_t i = 0; i + static_cast<std::size_t>(keep) < all.size(); ++i) {
    if (all[i] != target.string()) remove_quietly(all[i]);
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
    info.settings = manifest.at("settings").get<std::map<std::string, std::string>>();
    info.identity = manifest.at("identity").get<std::map<std::string, std::string>>();
    info.environment = manifest.at("environment").get<std::map<std::string, std::string>>();
  } catch (const json::exception& error) {
    fail(kInvalid, manifest_path.string(), " is damaged: ", error.what());
  }
  return info;
}

std::optional<CheckpointFolder::Found> CheckpointFolder::newest_valid() {
  const std::vector<std::string> all = committed();
  std::vector<std::pair<std::string, std::string>> damaged;  // path, reason
  for (auto path = all.rbegin(); path != all.rend(); ++path) {
    try {
      Found found{*path, verify_checkpoint(*path)};
      for (const auto& [bad, reason] : damaged) {
        std::string aside = bad + ".damaged";
        for (int number = 2; fs::exists(aside); ++number) aside = concat(bad, ".damaged-", number);
        log_warning("checkpoint set aside as ", aside, ": ", reason);
        rename_path(bad, aside, kInvalid);
      }
      if (!damaged.empty()) log_warning("going on from the checkpoint before it, ", *path);
      return found;
    } catch (const Error& error) {
      damaged.emplace_back(*path, error.what());
    }
  }
  if (damaged.empty()) return std::nullopt;
  std::string reasons;
  for (const auto& [path, reason] : damaged) reasons += "\n  " + path + ": " + reason;
  fail(kInvalid, "no valid checkpoint in ", folder_, " (", damaged.size(), " committed, all damaged):", reasons,
       "\nrestore one of them, or start again with --fresh (the old run is kept under another name)");
}

void load_checkpoint(const std::string& step_folder, ParameterStore& store) {
  const fs::path manifest_path = fs::path(step_folder) / kManifest;
  std::map<std::string, std::string> file_of;
  try {
    const json manifest = json::parse(read_file(manifest_path, kInvalid));
    for (const json& parameter : manifest.at("parameters")) {
      file_of[parameter.at("name").get<std::string>()] = parameter.at("file").get<std::string>();
    }
  } catch (const json::exception& error) {
    fail(kInvalid, manifest_path.string(), " is damaged: ", error.what());
  }
  for (const auto& [name, file] : file_of) {
    CRAM_CHECK(store.has(name), kInvalid, step_folder, " has the tensor ", name, ", which this model has not");
  }
  const ArrayFileReader reader((fs::path(step_folder) / kRankFile).string(), kInvalid);
  for (ParamId id = 0; id < store.size(); ++id) {
    const std::string& name = store.spec(id).name;
    CRAM_CHECK(file_of.count(name) == 1, kInvalid, step_folder, " lacks the tensor ", name);
    for (const StateKind& kind : kStateKinds) {
      const at::Tensor& target = (store.*kind.tensor)(id);
      if (!target.defined()) continue;
      const at::Tensor host = at::empty(target.sizes(), target.options().device(at::kCPU));
      reader.read(concat("/", kind.name, "/", name), array_info(host), host.data_ptr());
      target.copy_(host);
    }
  }
  store.refresh_working();
}

}  // namespace cram
