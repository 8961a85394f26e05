#include "run/checkpoint_load.h"

#include <torch/types.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>
#include <tuple>

#include "base/digest.h"
#include "base/log.h"
#include "parallel/agreement.h"

namespace cram {
namespace {

namespace fs = std::filesystem;
using OwnedRange = ParameterStore::OwnedRange;

constexpr ExitCode kInvalid = ExitCode::kNoCheckpoint;

// Runs `work` on every rank, then all of them throw what one of them threw: refusals first, else damage. Nobody may
// wait for a rank that gave up.
void together(Communicator& world, const std::function<void()>& work) {
  constexpr char kRefused = 'R', kDamaged = 'D';
  std::string problem;
  try {
    work();
  } catch (const CheckpointDamage& damage) {
    problem = kDamaged + std::string(damage.what());
  } catch (const Error& error) {
    if (world.size() == 1) throw;
    problem = kRefused + concat("rank ", world.rank(), ": ", error.what());
  }
  std::string verdict;
  for (const std::string& found : gather_text_to_root(world, problem)) {
    if (found.empty() || (!verdict.empty() && verdict[0] == kRefused)) continue;
    if (verdict.empty() || found[0] == kRefused) verdict = found;
  }
  verdict = broadcast_text(world, verdict);
  if (verdict.empty()) return;
  if (verdict[0] == kDamaged) throw CheckpointDamage(verdict.substr(1));
  fail(kInvalid, verdict.substr(1));
}

CheckpointManifest share_catalogue(const std::string& step_folder, Communicator& world) {
  std::string text;
  together(world, [&] {
    if (world.rank() == 0) text = read_catalogue(step_folder);
  });
  text = broadcast_text(world, text);
  CheckpointManifest manifest;
  together(world, [&] { manifest = parse_catalogue(text, step_folder); });
  return manifest;
}

// Version 2 has a digest of each file only: before anything of them is used, the ranks share the files out.
void check_whole_files(const std::string& step_folder, const CheckpointManifest& manifest, Communicator& world) {
  if (manifest.version > 2) return;
  together(world, [&] {
    for (std::size_t i = 0; i < manifest.files.size(); ++i) {
      if (static_cast<int>(i % static_cast<std::size_t>(world.size())) != world.rank()) continue;
      const std::string path = (fs::path(step_folder) / manifest.files[i].name).string();
      const std::string digest = digest_file(path);
      if (digest != manifest.files[i].digest) {
        damaged(path, " has digest ", digest, ", expected ", manifest.files[i].digest);
      }
    }
  });
}

// Consecutive elements that are consecutive both in a slice and in the whole tensor.
struct Run {
  std::int64_t in_slice = 0, in_tensor = 0, count = 0;
};

// Elements [begin, end) of a slice, without its padding.
std::vector<Run> runs_of(const ParamSpec& spec, std::int64_t begin, std::int64_t end) {
  const auto dim = static_cast<std::size_t>(spec.slice_dim);
  std::int64_t outer = 1, inner = 1;
  for (std::size_t d = 0; d < dim; ++d) outer *= spec.global_shape[d];
  for (std::size_t d = dim + 1; d < spec.global_shape.size(); ++d) inner *= spec.global_shape[d];
  const std::int64_t extent = spec.global_shape[dim] / spec.slice_groups;
  const std::int64_t stride = (spec.slice_end - spec.slice_begin) * inner;
  const std::int64_t count = (std::min(spec.slice_end, extent) - std::min(spec.slice_begin, extent)) * inner;
  std::vector<Run> runs;
  for (std::int64_t p = 0; p < outer * spec.slice_groups; ++p) {
    Run run{p * stride, (p * extent + spec.slice_begin) * inner, count};
    const std::int64_t skipped = std::max<std::int64_t>(0, begin - run.in_slice);
    run.count = std::min(run.count, end - run.in_slice) - skipped;
    run.in_slice += skipped;
    run.in_tensor += skipped;
    if (run.count <= 0) continue;
    if (!runs.empty() && runs.back().in_slice + runs.back().count == run.in_slice &&
        runs.back().in_tensor + runs.back().count == run.in_tensor) {
      runs.back().count += run.count;
    } else {
      runs.push_back(run);
    }
  }
  return runs;
}

// Elements that go from one slice to another: the stored one and this rank's.
struct Copy {
  std::int64_t from = 0, to = 0, count = 0;
};

// Both lists ascend in the tensor.
std::vector<Copy> copies_between(const std::vector<Run>& source, const std::vector<Run>& target) {
  std::vector<Copy> copies;
  for (std::size_t s = 0, t = 0; s < source.size() && t < target.size();) {
    const Run& a = source[s];
    const Run& b = target[t];
    const std::int64_t begin = std::max(a.in_tensor, b.in_tensor);
    const std::int64_t end = std::min(a.in_tensor + a.count, b.in_tensor + b.count);
    if (begin < end) {
      copies.push_back({a.in_slice + begin - a.in_tensor, b.in_slice + begin - b.in_tensor, end - begin});
    }
    (a.in_tensor + a.count < b.in_tensor + b.count ? s : t) += 1;
  }
  return copies;
}

// A tensor that this rank reads and how much of it is still to come.
struct Target {
  ParamId id = 0;
  std::vector<OwnedRange> ranges;
  std::int64_t missing = 0;
};

using ArrayKey = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t>;

ArrayKey key_of(const StoredArray& a) {
  return {a.spec.slice_dim, a.spec.slice_begin, a.spec.slice_end, a.spec.slice_groups, a.begin, a.end};
}

// Reads one rank's targets from the files, each file opened once, only where something of it is needed.
class TargetReader {
 public:
  TargetReader(std::string step_folder, const CheckpointManifest& manifest, ParameterStore& store)
      : step_folder_(std::move(step_folder)), manifest_(manifest), store_(store) {}

  /// `ranges` of the parameter's local tensor, with the tensors to fill.
  void add(ParamId id, std::vector<OwnedRange> ranges) {
    Target target{id, std::move(ranges), 0};
    for (const OwnedRange& range : target.ranges) {
      for (const Run& run : runs_of(store_.spec(id), range.begin, range.end)) target.missing += run.count;
      for (const NamedTensor& stored : range.stored()) stored.tensor.zero_();  // padding is in no file
    }
    targets_.emplace(store_.spec(id).name, std::move(target));
  }

  /// Begins with file `first`: ranks need not all ask for the same one.
  void read(std::size_t first) {
    const std::size_t files = manifest_.files.size();
    for (std::size_t i = 0; i < files; ++i) read_file((first + i) % files);
    for (const auto& [name, target] : targets_) {
      CRAM_CHECK(target.missing == 0, kInvalid, step_folder_, " has only part of the tensor ", name);
    }
  }
  [[nodiscard]] std::uintmax_t bytes_read() const { return bytes_read_; }

 private:
  void read_file(std::size_t index) {
    std::optional<PieceReader> reader;
    const std::string path = (fs::path(step_folder_) / manifest_.files[index].name).string();
    for (const StoredArray& array : manifest_.indexes[index].arrays) {
      const auto found = targets_.find(array.spec.name);
      // Tensor ranks that hold the same have written it each: one of them is enough.
      if (found == targets_.end() || !seen_[array.spec.name].insert(key_of(array)).second) continue;
      Target& target = found->second;
      const std::vector<Run> stored = runs_of(array.spec, array.begin, array.end);
      for (const OwnedRange& range : target.ranges) {
        const std::vector<Copy> copies =
            copies_between(stored, runs_of(store_.spec(target.id), range.begin, range.end));
        if (copies.empty()) continue;
        if (!reader) reader.emplace(path, manifest_.indexes[index], manifest_.type);
        for (const NamedTensor& wanted : range.stored()) {
          copy(*reader, array, wanted, range, copies);
        }
        for (const Copy& c : copies) target.missing -= c.count;
      }
    }
    if (reader) bytes_read_ += reader->bytes_read();
  }

  void copy(PieceReader& reader, const StoredArray& array, const NamedTensor& wanted, const OwnedRange& range,
            const std::vector<Copy>& copies) const {
    const Pieces pieces({manifest_.type, array.shape()});
    const auto type = wanted.tensor.scalar_type();
    const auto item = static_cast<std::int64_t>(wanted.tensor.element_size());
    const std::int64_t piece_elements = pieces.rows * pieces.row_elements;
    std::int64_t loaded = -1;
    const char* bytes = nullptr;
    for (const Copy& c : copies) {
      for (std::int64_t done = 0; done < c.count;) {
        const std::int64_t from = c.from + done - array.begin;  // in the stored array
        const std::int64_t piece = from / piece_elements;
        if (piece != loaded) bytes = reader.read(array, wanted.name, loaded = piece);
        const std::int64_t in_piece = from - piece * piece_elements;
        const std::int64_t count = std::min(c.count - done, piece_elements - in_piece);
        const at::Tensor part =
            at::from_blob(const_cast<char*>(bytes) + in_piece * item, {count}, at::TensorOptions().dtype(type));
        wanted.tensor.narrow(0, c.to + done - range.begin, count).copy_(part);
        done += count;
      }
    }
  }

  std::string step_folder_;
  const CheckpointManifest& manifest_;
  ParameterStore& store_;
  std::map<std::string, Target> targets_;
  std::map<std::string, std::set<ArrayKey>> seen_;
  std::uintmax_t bytes_read_ = 0;
};

void say_names(const std::string& step_folder, const char* what, const std::vector<std::string>& names) {
  if (names.empty()) return;
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "" : ", ") + name;
  log_info(step_folder, ": ", what, " (", names.size(), "): ", list);
}

// Parameters to load, after names, shapes and number format were compared.
std::vector<ParamId> matching(const std::string& step_folder, const CheckpointManifest& manifest,
                              const ParameterStore& store, const LoadRule& rule) {
  std::map<std::string, const StoredArray*> stored;
  for (const RankIndex& index : manifest.indexes) {
    for (const StoredArray& array : index.arrays) stored.emplace(array.spec.name, &array);
  }
  std::vector<std::string> unused, fresh;
  for (const auto& [name, array] : stored) {
    if (store.has(name) || rule.elsewhere.count(name) > 0) continue;
    CRAM_CHECK(rule.may_be_unused && rule.may_be_unused(name), kInvalid, step_folder, " has the tensor ", name,
               ", which this model has not");
    unused.push_back(name);
  }
  std::vector<ParamId> ids;
  for (ParamId id = 0; id < store.size(); ++id) {
    const ParamSpec& spec = store.spec(id);
    const auto found = stored.find(spec.name);
    if (found == stored.end()) {
      CRAM_CHECK(rule.may_be_fresh && rule.may_be_fresh(spec.name), kInvalid, step_folder, " lacks the tensor ",
                 spec.name, ": model.* must describe the model that was saved");
      fresh.push_back(spec.name);
      continue;
    }
    CRAM_CHECK(found->second->spec.global_shape == spec.global_shape, kInvalid, step_folder, ": tensor ", spec.name,
               " has shape ", shape_text(found->second->spec.global_shape), ", this model expects ",
               shape_text(spec.global_shape));
    ids.push_back(id);
  }
  const ArrayType expected = store.precision() == Precision::kFp64 ? ArrayType::kF64 : ArrayType::kF32;
  CRAM_CHECK(manifest.type == expected, kInvalid, step_folder, " has numbers of ", 8 * array_item_bytes(manifest.type),
             " bits, train.precision=", precision_name(store.precision()), " expects ", 8 * array_item_bytes(expected));
  say_names(step_folder, "tensors that only the model has keep their initial values", fresh);
  say_names(step_folder, "tensors that only the checkpoint has are not used", unused);
  return ids;
}

bool shared_out(const ParameterStore& store, ParamId id) {
  return store.buffers()[store.location(id).buffer].shared_out;
}

// Whether what this rank owns of a parameter lies in the files as it is: the layout that wrote it cut it alike.
bool stored_alike(const ParameterStore& store, ParamId id, const std::map<std::string, std::set<ArrayKey>>& stored) {
  const ParamSpec& spec = store.spec(id);
  const std::vector<OwnedRange> owned = store.owned(id);
  return std::all_of(owned.begin(), owned.end(), [&](const OwnedRange& range) {
    return stored.at(spec.name).count(key_of({spec, range.begin, range.end, {}, {}})) > 0;
  });
}

std::map<std::string, std::set<ArrayKey>> stored_arrays(const CheckpointManifest& manifest) {
  std::map<std::string, std::set<ArrayKey>> stored;
  for (const RankIndex& index : manifest.indexes) {
    for (const StoredArray& array : index.arrays) stored[array.spec.name].insert(key_of(array));
  }
  return stored;
}

// Tensors for all of a parameter's local elements, of which this rank owns a part or nothing.
OwnedRange whole_of(const ParameterStore& store, ParamId id) {
  const std::int64_t numel = store.local_numel(id);
  const FlatBuffers& b = store.buffers()[store.location(id).buffer];
  OwnedRange whole{0, numel, at::zeros({numel}, b.master.options()), {}, {}};
  for (const NamedTensor& state : b.states) whole.states.push_back({state.name, at::zeros_like(whole.master)});
  return whole;
}

void take_owned(const ParameterStore& store, ParamId id, const OwnedRange& whole) {
  const std::vector<NamedTensor> from = whole.stored();
  for (const OwnedRange& range : store.owned(id)) {
    const std::vector<NamedTensor> to = range.stored();
    for (std::size_t k = 0; k < to.size(); ++k) to[k].tensor.copy_(from[k].tensor.slice(0, range.begin, range.end));
  }
}

}  // namespace

std::uintmax_t load_checkpoint(const std::string& step_folder, ParameterStore& store, const Mesh& mesh,
                               const LoadRule& rule) {
  const CheckpointManifest manifest = share_catalogue(step_folder, mesh.world());
  std::vector<ParamId> ids;
  together(mesh.world(), [&] { ids = matching(step_folder, manifest, store, rule); });
  check_whole_files(step_folder, manifest, mesh.world());
  // Each reads what it owns where the files are cut like the ranks' shares. Otherwise data ranks take turns to read all
  // of a parameter: each would meet pieces that are mostly of others, or all would read the same.
  Communicator& data = mesh.data();
  const auto stored = stored_arrays(manifest);
  const bool alike = std::all_of(ids.begin(), ids.end(),
                                 [&](ParamId id) { return !shared_out(store, id) || stored_alike(store, id, stored); });
  const bool all_alike = agree_on_largest(mesh.world(), alike ? 0 : 1) == 0;
  const auto reads_own = [&](ParamId id) { return data.size() == 1 || (shared_out(store, id) && all_alike); };
  const auto reader_of = [&](ParamId id) { return static_cast<int>(id % static_cast<ParamId>(data.size())); };
  std::map<ParamId, OwnedRange> read_whole;
  TargetReader reader(step_folder, manifest, store);
  together(mesh.world(), [&] {
    for (const ParamId id : ids) {
      if (!reads_own(id) && reader_of(id) != mesh.place().dp_rank) continue;
      if (reads_own(id) || !shared_out(store, id)) {
        reader.add(id, store.owned(id));
      } else {
        reader.add(id, {read_whole.emplace(id, whole_of(store, id)).first->second});
      }
    }
    if (!manifest.files.empty()) reader.read(static_cast<std::size_t>(mesh.world().rank()) % manifest.files.size());
  });
  for (const ParamId id : ids) {
    if (reads_own(id)) continue;
    const bool parts = shared_out(store, id);
    const auto found = read_whole.find(id);
    const std::vector<OwnedRange> ranges =
        !parts ? store.owned(id) : std::vector{found != read_whole.end() ? found->second : whole_of(store, id)};
    for (const OwnedRange& range : ranges) {
      for (const NamedTensor& each : range.stored()) data.broadcast_(each.tensor, reader_of(id));
      if (parts) take_owned(store, id, range);
    }
    read_whole.erase(id);
  }
  store.refresh_working();
  store.gather_working(data);
  return reader.bytes_read();
}

std::uintmax_t load_checkpoint(const std::string& step_folder, ParameterStore& store, const LoadRule& rule) {
  const std::unique_ptr<Communicator> alone = make_self_communicator();
  return load_checkpoint(step_folder, store, Mesh(*alone, Layout{}), rule);
}

CheckpointInfo verify_checkpoint(const std::string& step_folder, Communicator& world) {
  const CheckpointManifest manifest = share_catalogue(step_folder, world);
  check_whole_files(step_folder, manifest, world);
  together(world, [&] {
    std::int64_t number = 0;
    for (std::size_t i = 0; i < manifest.files.size(); ++i) {
      const std::string path = (fs::path(step_folder) / manifest.files[i].name).string();
      std::optional<PieceReader> reader;
      const auto open = [&] { reader.emplace(path, manifest.indexes[i], manifest.type); };
      if (static_cast<int>(i % static_cast<std::size_t>(world.size())) == world.rank()) open();
      for (const StoredArray& array : manifest.indexes[i].arrays) {
        const std::int64_t pieces = Pieces({manifest.type, array.shape()}).count();
        for (const auto& [kind, digests] : array.digests) {
          for (std::int64_t piece = 0; piece < pieces; ++piece) {
            if (number++ % world.size() != world.rank()) continue;
            if (!reader) open();
            (void)reader->read(array, kind, piece);
          }
        }
      }
    }
  });
  return manifest.info;
}

CheckpointInfo verify_checkpoint(const std::string& step_folder) {
  const std::unique_ptr<Communicator> alone = make_self_communicator();
  return verify_checkpoint(step_folder, *alone);
}

}  // namespace cram
