// A rank reads what it owns, by pieces, each checked before use; what all ranks read does not grow with their number;
// damage that one rank meets makes all take the checkpoint before.
#include <gtest/gtest.h>
#include <torch/types.h>

#include <filesystem>
#include <map>
#include <mutex>

#include "base/file_io.h"
#include "base/log.h"
#include "base/rng.h"
#include "run/checkpoint.h"
#include "support/expect_error.h"
#include "support/golden.h"
#include "support/temporary_folder.h"
#include "support/thread_ranks.h"

namespace cram::test {
namespace {

namespace fs = std::filesystem;

// Three tensors: one of several pieces and a rest, one that tensor ranks share by columns, one that all hold.
constexpr std::int64_t kRows = 1501, kColumns = 1001, kNorm = 333;

struct Shape {
  int tensor = 1, data = 1;
  bool zero = false;
  std::int64_t bucket = 1 << 18;

  [[nodiscard]] Layout layout() const { return {.tensor = tensor, .pipeline = 1, .data = data}; }
  [[nodiscard]] std::string text() const { return layout().text() + (zero ? " zero" : ""); }
};

void build(ParameterStore& store, const Shape& shape, const Mesh& mesh, bool states = true) {
  const std::int64_t rank = mesh.place().tp_rank;
  ParamSpec rows{.name = "large.weight", .global_shape = {kRows, kColumns}};
  const std::int64_t part = (kRows + shape.tensor - 1) / shape.tensor;  // padded where it does not divide
  rows.slice_begin = rank * part;
  rows.slice_end = (rank + 1) * part;
  ParamSpec columns{.name = "columns.weight", .global_shape = {300, 24 * 7}};
  columns.slice_dim = 1;
  columns.slice_groups = 2;
  columns.slice_begin = rank * (12 * 7 / shape.tensor);
  columns.slice_end = (rank + 1) * (12 * 7 / shape.tensor);
  store.add(rows);
  store.add(columns);
  store.add({.name = "norm.bias", .global_shape = {kNorm}, .traits = {.decay = false, .full_precision = true}});
  const Partition partition =
      shape.zero ? Partition{mesh.place().dp_rank, shape.data, shape.bucket} : Partition{0, 1, shape.bucket};
  if (states) {
    store.allocate(Precision::kBf16, at::kCPU, adam_states(), partition);
  } else {
    store.allocate(Precision::kBf16, at::kCPU);
  }
}

// The value of an element of a whole tensor, equal in every layout and different from its neighbours'.
at::Tensor whole_values(const ParamSpec& spec, const std::string& kind, std::uint64_t seed) {
  static std::mutex mutex;
  static std::map<std::string, at::Tensor> made;
  const std::lock_guard lock(mutex);
  at::Tensor& values = made[concat(seed, kind, spec.name)];
  if (!values.defined()) {
    const auto first = static_cast<std::int64_t>(stream_key(seed, kind + spec.name) >> 40U);
    values = at::arange(element_count(spec.global_shape), at::kLong).mul_(7919).add_(first).bitwise_and_(0xffffff);
    values = values.to(at::kFloat).view(spec.global_shape);
  }
  return values;
}

void fill(ParameterStore& store, const Mesh& mesh, std::uint64_t seed) {
  for (ParamId id = 0; id < store.size(); ++id) {
    for (const ParameterStore::OwnedRange& range : store.owned(id)) {
      for (const NamedTensor& stored : range.stored()) {
        const at::Tensor local = take_slice(whole_values(store.spec(id), stored.name, seed), store.spec(id));
        stored.tensor.copy_(local.reshape({-1}).slice(0, range.begin, range.end));
      }
    }
  }
  store.refresh_working();
  store.gather_working(mesh.data());
}

void expect_values(const ParameterStore& store, std::uint64_t seed, const std::string& what) {
  for (ParamId id = 0; id < store.size(); ++id) {
    const ParamSpec& spec = store.spec(id);
    for (const ParameterStore::OwnedRange& range : store.owned(id)) {
      for (const NamedTensor& stored : range.stored()) {
        const at::Tensor local = take_slice(whole_values(spec, stored.name, seed), spec).reshape({-1});
        EXPECT_TRUE(stored.tensor.equal(local.slice(0, range.begin, range.end)))
            << what << ": " << stored.name << " of " << spec.name;
      }
    }
    const at::Tensor master = take_slice(whole_values(spec, "master", seed), spec);
    EXPECT_TRUE(store.weight(id).equal(master.to(store.weight(id).scalar_type()))) << what << ": " << spec.name;
  }
}

CheckpointInfo info_at(std::int64_t step) {
  CheckpointInfo info;
  info.progress.step = step;
  return info;
}

void save(const std::string& folder, const Shape& shape, std::int64_t step) {
  const auto messages = run_ranks(shape.layout().world_size(), [&](Communicator& world) {
    const Mesh mesh(world, shape.layout());
    ParameterStore store;
    build(store, shape, mesh);
    fill(store, mesh, static_cast<std::uint64_t>(step));
    CheckpointFolder(folder).save(store, info_at(step), 100, world, shape.zero || mesh.place().dp_rank == 0);
  });
  for (const std::string& message : messages) EXPECT_EQ(message, "") << shape.text();
}

// Loads on every rank of `shape`; returns the bytes that all have read.
std::uintmax_t load(const std::string& step_folder, const Shape& shape, std::uint64_t seed) {
  std::mutex mutex;
  std::uintmax_t bytes = 0;
  const auto messages = run_ranks(shape.layout().world_size(), [&](Communicator& world) {
    const Mesh mesh(world, shape.layout());
    ParameterStore store;
    build(store, shape, mesh);
    fill(store, mesh, 99);  // what is not written must show
    const std::uintmax_t own = load_checkpoint(step_folder, store, mesh);
    const std::lock_guard lock(mutex);
    bytes += own;
    expect_values(store, seed, shape.text());
  });
  for (const std::string& message : messages) EXPECT_EQ(message, "") << shape.text();
  return bytes;
}

const Shape kShapes[] = {{},
                         {.tensor = 1, .data = 2},
                         {.tensor = 1, .data = 8},
                         {.tensor = 1, .data = 2, .zero = true},
                         {.tensor = 1, .data = 8, .zero = true},
                         {.tensor = 1, .data = 3, .zero = true, .bucket = 1 << 22},
                         {.tensor = 3, .data = 1},
                         {.tensor = 2, .data = 2, .zero = true},
                         {.tensor = 3, .data = 2}};

TEST(CheckpointPieces, EveryLayoutLoadsEveryOther) {
  const TemporaryFolder root;
  for (const Shape& from : kShapes) {
    const std::string folder = root / (from.text() + std::to_string(from.bucket));
    save(folder, from, 7);
    for (const Shape& to : kShapes) (void)load(folder + "/step-000000007", to, 7);
  }
}

TEST(CheckpointPieces, BytesReadDoNotGrowWithTheRanks) {
  const TemporaryFolder root;
  const double all = 3.0 * 4 * (kRows * kColumns + 300 * 24 * 7 + kNorm);
  for (const Shape& from : {Shape{}, Shape{.tensor = 1, .data = 8, .zero = true}}) {
    const std::string folder = root / from.text();
    save(folder, from, 5);
    for (const Shape& to : kShapes) {
      const auto bytes = static_cast<double>(load(folder + "/step-000000005", to, 5));
      const std::string what = from.text() + " read by " + to.text();
      EXPECT_GE(bytes, all) << what;
      // Tensor ranks that are cut otherwise than the files meet each piece at a border twice.
      EXPECT_LE(bytes, all * (from.tensor == to.tensor ? 1.01 : 1.5)) << what;
      std::printf("%s: %.2f of the checkpoint\n", what.c_str(), bytes / all);
    }
  }
}

// Of the arrays of a step folder one byte in the last piece of `path`.
void damage_last_piece(const std::string& file, const std::string& path) {
  std::int64_t offset = 0, bytes = 0;
  {
    const ArrayFileReader reader(file, ExitCode::kOther);
    offset = reader.offset(path);
    bytes = 4 * element_count(reader.info(path).shape);
  }
  std::string content = read_file(file);
  content[static_cast<std::size_t>(offset + bytes - 1)] ^= 1;
  write_file_atomically(file, content);
}

TEST(CheckpointPieces, AMessageNamesThePieceAndOnlyItsReadersMeetIt) {
  const TemporaryFolder root;
  save((root / "c"), {}, 3);
  const std::string step = (root / "c/step-000000003");
  damage_last_piece(step + "/rank-00000.h5", "/exp_avg/large.weight");
  expect_error(ExitCode::kNoCheckpoint, {"rank-00000.h5", "piece 6 of 6", "/exp_avg/large.weight", "digest"},
               [&] { (void)verify_checkpoint(step); });
  for (const int ranks : {2, 3, 5}) {
    const auto messages = run_ranks(ranks, [&](Communicator& world) { (void)verify_checkpoint(step, world); });
    for (const std::string& message : messages) EXPECT_NE(message.find("piece 6 of 6"), std::string::npos) << message;
  }
  // Evaluation has no states: nothing that it uses is damaged.
  ParameterStore store;
  build(store, {}, self_mesh(), /*states=*/false);
  EXPECT_NO_THROW(load_checkpoint(step, store));
  expect_values(store, 3, "without states");
}

TEST(CheckpointPieces, WhatOneRankFindsMakesAllTakeTheOneBefore) {
  const Shape shape{.tensor = 1, .data = 4, .zero = true};
  for (const bool refuse : {false, true}) {
    const TemporaryFolder root;
    const std::string folder = (root / "c");
    for (const std::int64_t step : {10, 20, 30}) save(folder, shape, step);
    // The second rank's file of the newest, the last rank's of the one before.
    const std::string newest = folder + "/step-000000030";
    const CheckpointManifest manifest = parse_catalogue(read_catalogue(newest), newest);
    damage_last_piece(newest + "/rank-00001.h5", manifest.indexes[1].arrays.back().path("exp_avg_sq"));
    const std::string path = folder + "/step-000000020/rank-00003.h5";
    std::string content = read_file(path);
    content[100] ^= 4;  // what HDF5 itself would read
    write_file_atomically(path, content);
    std::vector<std::int64_t> accepted;
    const auto messages = run_ranks(4, [&](Communicator& world) {
      const Mesh mesh(world, shape.layout());
      ParameterStore store;
      build(store, shape, mesh);
      CheckpointFolder checkpoints(folder);
      CheckpointFolder::Found found;
      if (world.rank() == 0) {
        found = *checkpoints.newest();
      }
      EXPECT_EQ(found.info.progress.step, world.rank() == 0 ? 30 : 0);
      found = checkpoints.load(found, store, mesh, {}, [&](const CheckpointFolder::Found& next) {
        accepted.push_back(next.info.progress.step);
        CRAM_CHECK(!refuse, ExitCode::kUsage, "not this one");
      });
      EXPECT_EQ(found.info.progress.step, world.rank() == 0 ? 10 : 0);
      expect_values(store, 10, "after damage");
    });
    std::vector<std::string> names;
    for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
      names.push_back(entry.path().filename().string());
    }
    std::sort(names.begin(), names.end());
    if (refuse) {
      for (const std::string& message : messages) EXPECT_NE(message, "");
      EXPECT_NE(messages[0].find("not this one"), std::string::npos) << messages[0];
      EXPECT_EQ(names, (std::vector<std::string>{"step-000000010", "step-000000020", "step-000000030"}));
    } else {
      for (const std::string& message : messages) EXPECT_EQ(message, "");
      EXPECT_EQ(accepted, (std::vector<std::int64_t>{20, 10}));
      EXPECT_EQ(names,
                (std::vector<std::string>{"step-000000010", "step-000000020.damaged", "step-000000030.damaged"}));
    }
  }
}

TEST(CheckpointPieces, AFreshHeadOnALoadedTrunk) {
  const TemporaryFolder root;
  save((root / "c"), {.tensor = 1, .data = 2}, 4);
  const std::string step = (root / "c/step-000000004");
  const auto build_other = [](ParameterStore& store) {
    store.add({.name = "large.weight", .global_shape = {kRows, kColumns}});
    store.add({.name = "head.weight", .global_shape = {5, 7}, .init_value = 0.5});
    store.allocate(Precision::kBf16, at::kCPU, adam_states());
    store.initialize(1);
  };
  ParameterStore plain, fresh;
  build_other(plain);
  expect_error(ExitCode::kNoCheckpoint, {"columns.weight", "which this model has not"},
               [&] { load_checkpoint(step, plain); });
  const auto not_large = [](const std::string& name) { return name != "large.weight"; };
  expect_error(ExitCode::kNoCheckpoint, {"lacks the tensor head.weight"},
               [&] { load_checkpoint(step, plain, {.may_be_unused = not_large}); });
  build_other(fresh);
  const at::Tensor before = fresh.master(1).clone();
  const std::string log = (root / "log");
  open_log_file(log);
  load_checkpoint(step, fresh, {.may_be_fresh = not_large, .may_be_unused = not_large});
  open_log_file((root / "other"));
  EXPECT_TRUE(fresh.master(1).equal(before));
  EXPECT_TRUE(fresh.weight(1).equal(before.to(at::kBFloat16)));
  EXPECT_TRUE(fresh.master(0).equal(whole_values(fresh.spec(0), "master", 4)));
  EXPECT_TRUE(fresh.state(0, "exp_avg").equal(whole_values(fresh.spec(0), "exp_avg", 4)));
  const std::string said = read_file(log);
  for (const char* word :
       {"keep their initial values (1): head.weight", "are not used (2): columns.weight, norm.bias"}) {
    EXPECT_NE(said.find(word), std::string::npos) << said;
  }
}

TEST(CheckpointPieces, AnotherOptimizersStatesAreRefusedNotDamage) {
  const TemporaryFolder root;
  save((root / "c"), {}, 4);
  ParameterStore store;
  store.add({.name = "large.weight", .global_shape = {kRows, kColumns}});
  store.allocate(Precision::kFp32, at::kCPU,
                 {.states = [](const ParamClass&) -> std::vector<std::string> { return {"momentum"}; }});
  CheckpointFolder folder((root / "c"));
  expect_error(ExitCode::kNoCheckpoint, {"momentum", "large.weight", "another optimizer"},
               [&] { (void)folder.load_newest(store, {.may_be_unused = [](const std::string&) { return true; }}); });
  EXPECT_TRUE(fs::exists((root / "c/step-000000004")));
}

}  // namespace
}  // namespace cram::test
