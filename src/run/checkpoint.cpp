#include "run/checkpoint.h"

#include <torch/types.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>

#include "base/digest.h"
#include "base/file_io.h"
#include "base/log.h"
#include "parallel/agreement.h"

namespace cram {
namespace {

namespace fs = std::filesystem;

constexpr ExitCode kStorage = ExitCode::kCheckpointStorage;
constexpr ExitCode kInvalid = ExitCode::kNoCheckpoint;

using OwnedRange = ParameterStore::OwnedRange;

void remove_quietly(const fs::path& path) {
  try {
    remove_tree(path);
  } catch (const Error& error) {
    log_warning(error.what());
  }
}

ArrayType stored_type(const ParameterStore& store) {
  return store.precision() == Precision::kFp64 ? ArrayType::kF64 : ArrayType::kF32;
}

std::vector<std::string> digest_pieces(const ArrayInfo& info, const void* data) {
  const Pieces pieces(info);
  const std::size_t row_bytes = static_cast<std::size_t>(pieces.row_elements) * array_item_bytes(info.type);
  std::vector<std::string> digests;
  for (std::int64_t piece = 0; piece < pieces.count(); ++piece) {
    digests.push_back(
        digest_bytes(static_cast<const char*>(data) + static_cast<std::size_t>(pieces.first_row(piece)) * row_bytes,
                     static_cast<std::size_t>(pieces.rows_of(piece)) * row_bytes));
  }
  return digests;
}

// Writes this rank's tensors and says what is where; the digests are of what lies in memory.
std::vector<StoredArray> write_arrays(const fs::path& path, const ParameterStore& store) {
  std::vector<StoredArray> arrays;
  ArrayFileWriter writer(path.string(), kStorage);
  for (ParamId id = 0; id < store.size(); ++id) {
    const ParamSpec& spec = store.spec(id);
    if (!spec.traits.counts) continue;  // the first of two tied copies is written
    for (const OwnedRange& range : store.owned(id)) {
      StoredArray array{spec, range.begin, range.end, {}, {}};
      const ArrayInfo info{stored_type(store), array.shape()};
      for (const NamedTensor& stored : range.stored()) {
        const at::Tensor host = stored.tensor.cpu().contiguous();
        writer.write(array.path(stored.name), info, host.const_data_ptr());
        array.digests[stored.name] = digest_pieces(info, host.const_data_ptr());
      }
      arrays.push_back(std::move(array));
    }
  }
  writer.close();
  return arrays;
}

// What lies in the file now must be what lay in memory. Fills in what only the finished file knows.
void read_back(const std::string& path, RankIndex& index, ArrayType type) {
  {
    const ArrayFileReader file(path, kStorage);
    for (StoredArray& array : index.arrays) {
      for (const auto& [kind, digests] : array.digests) array.offsets[kind] = file.offset(array.path(kind));
    }
  }
  index.frame = frame_digest(path, index, type);
  PieceReader reader(path, index, type);
  for (const StoredArray& array : index.arrays) {
    const std::int64_t pieces = Pieces({type, array.shape()}).count();
    for (const auto& [kind, digests] : array.digests) {
      for (std::int64_t piece = 0; piece < pieces; ++piece) (void)reader.read(array, kind, piece);
    }
  }
}

// A rank's pair of files, durable and read back.
RankFile write_rank_file(const fs::path& folder, int rank, const ParameterStore& store) {
  RankFile file;
  file.name = rank_file_name(rank);
  const fs::path path = folder / file.name;
  RankIndex index{write_arrays(path, store), ""};
  sync_file(path, kStorage);
  file.bytes = fs::file_size(path);
  try {
    read_back(path.string(), index, stored_type(store));
  } catch (const Error& error) {
    fail(kStorage, "the file just written does not hold what was saved: ", error.what());
  }
  const std::string text = index_text(index);
  file.digest = digest_text(text);
  file.index_bytes = text.size();
  write_file_atomically(folder / index_name(file.name), text, kStorage);
  return file;
}

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

std::uintmax_t checkpoint_bytes(const ParameterStore& store) {
  std::uintmax_t bytes = 0;
  for (ParamId id = 0; id < store.size(); ++id) {
    for (const OwnedRange& range : store.owned(id)) {
      for (const NamedTensor& stored : range.stored()) bytes += stored.tensor.nbytes();
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
    if (writes) entry = rank_file_text(write_rank_file(temporary, world.rank(), store));
  } catch (const std::exception& error) {
    problem = error.what();
  }
  const std::vector<std::string> entries = gather_text_to_root(world, entry);
  const std::vector<std::string> problems = gather_text_to_root(world, problem);
  std::uintmax_t bytes = 0;
  on_root(world, [&] { bytes = commit(temporary, target.string(), entries, problems, store, info, keep); });
  return bytes;
}

std::uintmax_t CheckpointFolder::commit(const std::string& temporary, const std::string& target,
                                        const std::vector<std::string>& entries,
                                        const std::vector<std::string>& problems, const ParameterStore& store,
                                        const CheckpointInfo& info, std::int64_t keep) const {
  std::uintmax_t bytes = 0;
  try {
    for (std::size_t rank = 0; rank < problems.size(); ++rank) {
      CRAM_CHECK(problems[rank].empty(), kStorage, problems.size() > 1 ? concat("rank ", rank, ": ") : "",
                 problems[rank]);
    }
    std::vector<RankFile> files;
    for (const std::string& entry : entries) {
      if (entry.empty()) continue;
      files.push_back(parse_rank_file(entry));
      bytes += files.back().bytes + files.back().index_bytes;
    }
    write_file_atomically(fs::path(temporary) / kCheckpointManifest,
                          checkpoint_manifest_text(info, store.precision(), files), kStorage);
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
  // Old ones go only now, and only after the new one was read back: the tensors by their ranks, the rest here.
  try {
    check_sizes(target, read_checkpoint_manifest(target));
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

std::optional<CheckpointFolder::Found> CheckpointFolder::newest() {
  const std::vector<std::string> all = committed();
  for (auto path = all.rbegin(); path != all.rend(); ++path) {
    if (std::any_of(damaged_.begin(), damaged_.end(), [&](const Damaged& d) { return d.path == *path; })) continue;
    check_readable(*path);
    try {
      const CheckpointManifest manifest = read_checkpoint_manifest(*path);
      check_sizes(*path, manifest);
      return Found{*path, manifest.info};
    } catch (const CheckpointDamage& damage) {
      damaged_.push_back({*path, damage.what()});
    }
  }
  if (damaged_.empty()) {
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
  for (const Damaged& each : damaged_) reasons += "\n  " + each.path + ": " + each.reason;
  fail(kInvalid, "no valid checkpoint in ", folder_, " (", damaged_.size(), " committed, all damaged):", reasons,
       "\nrestore one of them, or start again with --fresh (the old run is kept under another name)");
}

CheckpointFolder::Found CheckpointFolder::load(const Found& newest_found, ParameterStore& store, const Mesh& mesh,
                                               const LoadRule& rule, const std::function<void(const Found&)>& accept) {
  Communicator& world = mesh.world();
  Found found = newest_found;
  for (;;) {
    try {
      (void)load_checkpoint(broadcast_text(world, found.path), store, mesh, rule);
      break;
    } catch (const CheckpointDamage& damage) {
      on_root(world, [&] {
        damaged_.push_back({found.path, damage.what()});
        found = *newest();  // with a damaged one it throws where there is none
        accept(found);
      });
    }
  }
  on_root(world, [&] { set_damaged_aside(found.path); });
  return found;
}

std::optional<CheckpointFolder::Found> CheckpointFolder::load_newest(ParameterStore& store, const LoadRule& rule) {
  const std::optional<Found> found = newest();
  if (!found) return std::nullopt;
  const std::unique_ptr<Communicator> alone = make_self_communicator();
  return load(*found, store, Mesh(*alone, Layout{}), rule, [](const Found&) {});
}

void CheckpointFolder::set_damaged_aside(const std::string& valid) {
  for (const Damaged& each : damaged_) set_aside(each.path, each.reason, valid);
  if (!damaged_.empty()) log_warning("going on from the checkpoint before it, ", valid);
  damaged_.clear();
}

}  // namespace cram
