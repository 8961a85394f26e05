#include "data/manifest.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "base/check.h"
#include "base/digest.h"
#include "base/file_io.h"
#include "base/log.h"

namespace cram {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kManifestVersion = 1;
constexpr std::uintmax_t kManifestLimit = 64U << 20U;
constexpr const char* kSelfDigest = "manifest_digest";

std::string body_text(const Json& body) { return body.dump(1); }

std::string file_text(Json body) {
  body[kSelfDigest] = digest_text(body_text(body));
  return body_text(body) + "\n";
}

Json to_json(const Manifest& manifest) {
  Json body;
  body["magic"] = "cram-manifest";
  body["version"] = kManifestVersion;
  body["kind"] = manifest.kind;
  body["inputs_digest"] = manifest.inputs_digest;
  body["settings"] = manifest.settings;
  body["tokenizer"] = {{"vocab_size", manifest.tokenizer.vocab_size},
                       {"type", manifest.tokenizer.type},
                       {"digest", manifest.tokenizer.digest},
                       {"file_digest", manifest.tokenizer.file_digest}};
  body["counts"] = manifest.counts;
  if (manifest.kind != "shards") return body;
  body["seq_length"] = manifest.seq_length;
  body["order"] = manifest.order;
  for (const auto& [name, split] : manifest.splits) {
    Json& out = body["splits"][name];
    out["rows"] = split.rows;
    out["documents"] = split.documents;
    out["dropped_tokens"] = split.dropped_tokens;
    out["shards"] = Json::array();
    for (const ShardFile& shard : split.shards) {
      out["shards"].push_back(
          {{"name", shard.name}, {"rows", shard.rows}, {"bytes", shard.bytes}, {"digest", shard.digest}});
    }
  }
  return body;
}

Manifest from_json(const Json& body) {
  Manifest manifest;
  body.at("kind").get_to(manifest.kind);
  body.at("inputs_digest").get_to(manifest.inputs_digest);
  body.at("settings").get_to(manifest.settings);
  const Json& tokenizer = body.at("tokenizer");
  tokenizer.at("vocab_size").get_to(manifest.tokenizer.vocab_size);
  tokenizer.at("type").get_to(manifest.tokenizer.type);
  tokenizer.at("digest").get_to(manifest.tokenizer.digest);
  tokenizer.at("file_digest").get_to(manifest.tokenizer.file_digest);
  body.at("counts").get_to(manifest.counts);
  if (manifest.kind != "shards") return manifest;
  body.at("seq_length").get_to(manifest.seq_length);
  body.at("order").get_to(manifest.order);
  for (const auto& [name, in] : body.at("splits").items()) {
    SplitRecord& split = manifest.splits[name];
    in.at("rows").get_to(split.rows);
    in.at("documents").get_to(split.documents);
    in.at("dropped_tokens").get_to(split.dropped_tokens);
    for (const Json& shard : in.at("shards")) {
      split.shards.push_back({shard.at("name").get<std::string>(), shard.at("rows").get<std::int64_t>(),
                              shard.at("bytes").get<std::int64_t>(), shard.at("digest").get<std::string>()});
    }
  }
  return manifest;
}

/// Parses without trusting: nlohmann recurses when it copies or prints, so depth is limited while parsing.
Json parse(const std::string& text) {
  static constexpr int kDepthLimit = 8;
  const auto limit_depth = [](int depth, Json::parse_event_t, Json&) {
    CRAM_CHECK(depth <= kDepthLimit, ExitCode::kData, "it is nested more than ", kDepthLimit, " deep");
    return true;
  };
  return Json::parse(text, limit_depth);
}

/// "train-00012.h5": a name that `pack` gives, which it may therefore remove.
bool is_shard_name(std::string_view name) {
  for (const std::string_view split : {"train-", "validation-"}) {
    if (!name.starts_with(split) || !name.ends_with(".h5") || name.size() < split.size() + 3) continue;
    const std::string_view digits = name.substr(split.size(), name.size() - split.size() - 3);
    return digits.size() >= 5 && digits.find_first_not_of("0123456789") == std::string_view::npos;
  }
  return false;
}

std::string damage_of_shard(const std::filesystem::path& path, const ShardFile& shard, const ShardHeader& expected,
                            bool digests) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (!std::filesystem::is_regular_file(status)) return concat(path.string(), " is missing");
  const auto bytes = static_cast<std::int64_t>(std::filesystem::file_size(path, error));
  if (error) return concat(path.string(), ": ", error.message());
  if (bytes != shard.bytes) return concat(path.string(), " has ", bytes, " bytes, the manifest says ", shard.bytes);
  try {
    if (digests) {
      const std::string found = digest_file(path.string());
      if (found != shard.digest) {
        return concat(path.string(), " has digest ", found, ", the manifest says ", shard.digest);
      }
    }
    const ShardHeader header = ShardReader::open(path).header();
    if (header == expected) return "";
    return concat(path.string(), " is of other data: rows ", header.rows, ", seq_length ", header.seq_length,
                  ", vocab_size ", header.vocab_size, ", split ", header.split, ", order ", header.order,
                  ", tokenizer ", header.tokenizer_digest, "; the manifest says ", expected.rows, ", ",
                  expected.seq_length, ", ", expected.vocab_size, ", ", expected.split, ", ", expected.order, ", ",
                  expected.tokenizer_digest);
  } catch (const Error& fault) {
    return fault.what();
  }
}

}  // namespace

bool has_manifest(const std::filesystem::path& folder) {
  std::error_code ignored;
  return std::filesystem::exists(folder / kManifestName, ignored);
}

Manifest read_manifest(const std::filesystem::path& folder) {
  const std::filesystem::path path = folder / kManifestName;
  CRAM_CHECK(has_manifest(folder), ExitCode::kData, "no ", kManifestName, " in ", folder.string(),
             ": it is not a finished output of `cram_data tokenizer` or `cram_data pack`; run that command (again)");
  const std::string text = read_file(path, ExitCode::kData, kManifestLimit);
  try {
    Json body = parse(text);
    const Json recorded = body.at(kSelfDigest);
    body.erase(kSelfDigest);
    // Comparing whole texts catches a flipped bit anywhere, white space and duplicate keys included.
    CRAM_CHECK(file_text(body) == text, ExitCode::kData, "its digest ", recorded.get<std::string>(),
               " is not that of its content");
    CRAM_CHECK(body.at("magic") == "cram-manifest" && body.at("version") == kManifestVersion, ExitCode::kData,
               "it is version ", body.at("version").dump(), ", this program reads version ", kManifestVersion);
    return from_json(body);
  } catch (const std::exception& error) {
    fail(ExitCode::kData, "bad manifest ", path.string(), ": ", error.what(),
         ". It was damaged or edited: prepare the folder again with --force");
  }
}

void write_manifest(const std::filesystem::path& folder, const Manifest& manifest) {
  write_file_atomically(folder / kManifestName, file_text(to_json(manifest)), ExitCode::kData);
}

std::vector<Damage> find_damage(const std::filesystem::path& folder, const Manifest& manifest, bool digests,
                                CheckPart part) {
  std::vector<Damage> damage;
  const auto note = [&](const std::string& shard, std::string message) {
    if (!message.empty()) damage.push_back({shard, std::move(message)});
  };
  std::set<std::string> known;
  int number = 0;
  for (const auto& [name, split] : manifest.splits) {
    ShardHeader expected{manifest.seq_length, manifest.tokenizer.vocab_size, 0, 0, name,
                         manifest.order,      manifest.tokenizer.digest};
    std::int64_t rows = 0;
    for (const ShardFile& shard : split.shards) {
      known.insert(shard.name);
      rows += shard.rows;
      expected.rows = shard.rows;
      if (number++ % part.parts == part.part) {
        note(shard.name, damage_of_shard(folder / shard.name, shard, expected, digests));
      }
      ++expected.shard_index;
    }
    if (rows != split.rows && part.part == 0) {
      note("", concat("the ", name, " shards have ", rows, " rows together, the manifest says ", split.rows));
    }
  }
  if (part.part != 0) return damage;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (entry.path().extension() == ".h5" && !known.contains(name)) {
      note("", concat(entry.path().string(), " is not in the manifest: a shard of another preparation"));
    }
  }
  if (error) note("", concat("cannot list ", folder.string(), ": ", error.message()));
  const std::filesystem::path model = folder / kTokenizerFileName;
  if (!std::filesystem::is_regular_file(model, error)) {
    note("", concat(model.string(), " is missing"));
  } else if (digest_text(read_file(model, ExitCode::kData)) != manifest.tokenizer.file_digest) {
    note("",
         concat(model.string(), " is not the tokenizer of the manifest (digest ", manifest.tokenizer.file_digest, ")"));
  }
  return damage;
}

std::string damage_text(const std::vector<Damage>& damage) {
  constexpr std::size_t kShown = 5;
  std::string text;
  for (std::size_t i = 0; i < std::min(kShown, damage.size()); ++i) text += "\n  " + damage[i].message;
  if (damage.size() > kShown) text += concat("\n  and ", damage.size() - kShown, " more");
  return text;
}

bool is_already_made(const std::filesystem::path& folder, const Manifest& wanted, bool force) {
  if (!has_manifest(folder)) return false;
  Manifest present;
  try {
    present = read_manifest(folder);
  } catch (const Error&) {
    if (!force) throw;
    return false;
  }
  CRAM_CHECK(present.kind == wanted.kind, ExitCode::kUsage, folder.string(), " holds a folder of kind '", present.kind,
             "', not '", wanted.kind, "': choose another --output");
  std::string differences;
  if (present.inputs_digest != wanted.inputs_digest) {
    differences += concat("\n  inputs: ", present.inputs_digest, " there, ", wanted.inputs_digest, " asked for");
  }
  std::map<std::string, std::string> all = present.settings;
  all.insert(wanted.settings.begin(), wanted.settings.end());
  const auto value = [](const Manifest& manifest, const std::string& key) {
    const auto found = manifest.settings.find(key);
    return found == manifest.settings.end() ? std::string("nothing") : found->second;
  };
  for (const auto& [key, unused] : all) {
    const std::string there = value(present, key);
    const std::string asked = value(wanted, key);
    if (there != asked) differences += concat("\n  ", key, ": ", there, " there, ", asked, " asked for");
  }
  CRAM_CHECK(differences.empty() || force, ExitCode::kUsage, folder.string(),
             " was made from something else:", differences, "\nChoose another --output, or replace it with --force");
  if (!differences.empty()) return false;
  const std::vector<Damage> faults = find_damage(folder, present, /*digests=*/true);
  if (!faults.empty()) log_warning(folder.string(), " is damaged and will be made again: ", faults.front().message);
  return faults.empty() && !force;
}

FolderLock begin_folder(const std::filesystem::path& folder, const Manifest& wanted, bool force) {
  FolderLock lock(folder.string(), "writes", ExitCode::kData);
  // Somebody may have finished there since this process looked; what they made is refused as if it had been there.
  (void)is_already_made(folder, wanted, force);
  std::error_code error;
  std::filesystem::remove(folder / kManifestName, error);
  CRAM_CHECK(!error, ExitCode::kData, "cannot replace ", (folder / kManifestName).string(), ": ", error.message());
  sync_folder(folder, ExitCode::kData);
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    const bool leftover =
        is_temporary_name(name) && (name.starts_with(kManifestName) || name.starts_with(kTokenizerFileName) ||
                                    is_shard_name(name.substr(0, name.find(".tmp-"))));
    if (leftover || is_shard_name(name)) {
      std::filesystem::remove(entry.path(), error);
    }
  }
  return lock;
}

}  // namespace cram
