// A whole training run in one process with ranks as threads, in any layout, on made-up rows: what the layout tests
// compare. It uses the trainer's own TrainingStep and shows what lies between its parts.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "base/rng.h"
#include "parallel/communicator_suite.h"
#include "run/checkpoint.h"
#include "support/golden.h"
#include "support/thread_ranks.h"
#include "train/replicas.h"
#include "train/training_step.h"

namespace cram::test {

/// A group whose operations of one kind do nothing: the negative control of a reduction. Parts split off it are told
/// apart by name.
class Sabotaged final : public Communicator {
 public:
  struct Plan {
    std::string group;      // "data", "tensor", ...; "" sabotages nothing
    std::string operation;  // "all_reduce", "all_gather", "reduce_scatter"
  };
  Sabotaged(Communicator& inner, Plan plan, std::string name)
      : Communicator(inner.rank(), inner.size(), std::move(name)), inner_(&inner), plan_(std::move(plan)) {}

 protected:
  void check_tensor(const at::Tensor&) const override {}
  Work start_all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    return skips("all_reduce") ? Work() : inner_->all_reduce_async_(tensor, op);
  }
  Work start_all_gather(const at::Tensor& out, const at::Tensor& in) override {
    if (!skips("all_gather")) return inner_->all_gather_async(out, in);
    // What a rank has itself, everywhere: no garbage, but not the others' parts.
    const at::Tensor own = in.clone();
    for (int r = 0; r < size(); ++r) out.view({size(), -1}).select(0, r).copy_(own.view({-1}));
    return Work();
  }
  Work start_reduce_scatter(const at::Tensor& out, const at::Tensor& in, ReduceOp op) override {
    if (!skips("reduce_scatter")) return inner_->reduce_scatter_async(out, in, op);
    out.view({-1}).copy_(in.view({size(), -1}).select(0, rank()));
    return Work();
  }
  void do_broadcast(const at::Tensor& tensor, int root) override { inner_->broadcast_(tensor, root); }
  Work start_exchange(const std::vector<Message>& sends, const std::vector<Message>& receives) override {
    return inner_->exchange_async_(sends, receives);
  }
  void do_barrier() override { inner_->barrier(); }
  std::unique_ptr<Communicator> do_split(int color, int key, const std::string& name) override {
    auto part = inner_->split(color, key, name);
    auto wrapped = std::make_unique<Sabotaged>(*part, plan_, name);
    wrapped->owned_ = std::move(part);
    return wrapped;
  }

 private:
  [[nodiscard]] bool skips(const std::string& operation) const {
    return plan_.group == name() && plan_.operation == operation;
  }
  std::unique_ptr<Communicator> owned_;
  Communicator* inner_;
  Plan plan_;
};

struct Rows {
  /// Row of a global sample: ids, and a number of masked positions that differs from row to row, none in some.
  static Batch batch(const ModelConfig& model, std::int64_t first_sample, std::int64_t rows) {
    std::vector<std::int64_t> ids, positions, labels;
    for (std::int64_t r = 0; r < rows; ++r) {
      RandomStream random(stream_key(7, "row", static_cast<std::uint64_t>(first_sample + r)));
      const auto vocab = static_cast<std::uint64_t>(model.vocab_size);
      // A word follows its neighbour often, so that there is something to learn.
      std::int64_t word = static_cast<std::int64_t>(random.below(vocab));
      const std::int64_t masked = static_cast<std::int64_t>(random.below(5));
      for (std::int64_t s = 0; s < model.seq_length; ++s) {
        word =
            random.below(4) == 0 ? static_cast<std::int64_t>(random.below(vocab)) : (word * 3 + 1) % model.vocab_size;
        const bool hide = s % 4 == 1 && s / 4 < masked;
        if (hide) {
          positions.push_back(r * model.seq_length + s);
          labels.push_back(word);
        }
        ids.push_back(hide ? 4 : word);
      }
    }
    return batch_of(at::tensor(ids, at::kLong).view({rows, model.seq_length}), at::tensor(positions, at::kLong),
                    at::tensor(labels, at::kLong));
  }
};

/// Makes the rows [first_sample, first_sample + rows) of a run.
using MakeRows = std::function<Batch(const ModelConfig&, std::int64_t first_sample, std::int64_t rows)>;

/// A data rank's micro-batches, from sample 0 on.
class RowsSource final : public BatchSource {
 public:
  RowsSource(const ModelConfig& model, std::int64_t micro_batch, int dp_rank, int dp_size, MakeRows make = Rows::batch)
      : model_(model),
        make_(std::move(make)),
        micro_batch_(micro_batch),
        stride_(micro_batch * dp_size),
        next_(micro_batch * dp_rank) {}
  Batch next() override {
    Batch batch = make_(model_, next_, micro_batch_);
    next_ += stride_;
    return batch;
  }

 private:
  ModelConfig model_;
  MakeRows make_;
  std::int64_t micro_batch_, stride_, next_;
};

/// The model of docs: l=4, h=48, a=4, V=101, s=16.
inline ModelConfig layout_model() { return model_of(4, 48, 4, 96, 101, 16); }

/// Where runs take place unless their setup says otherwise: the CPU, or with CRAM_TEST_DEVICE=cuda the first GPU, which
/// all ranks share.
inline at::Device test_device() {
  const char* name = std::getenv("CRAM_TEST_DEVICE");
  if (name == nullptr || std::string(name) == "cpu") return at::kCPU;
  CRAM_CHECK(std::string(name) == "cuda", ExitCode::kUsage, "CRAM_TEST_DEVICE=", name, ": expected cpu or cuda");
  CRAM_CHECK(at::hasCUDA(), ExitCode::kUsage, "CRAM_TEST_DEVICE=cuda, but no GPU is visible: check the driver");
  return {at::kCUDA, 0};
}

struct TrainingSetup {
  ModelConfig model = layout_model();
  at::Device device = test_device();
  Layout layout;
  std::int64_t virtual_stages = 1;
  bool zero = false;
  bool sequence_parallel = false;
  bool overlap = true;
  std::string recompute = "none";
  std::string schedule = "auto";
  std::string split;
  double dropout = 0;
  std::int64_t steps = 20;
  std::int64_t batch_size = 24;
  std::int64_t micro_batch = 2;
  Precision precision = Precision::kFp64;
  std::int64_t bucket_elements = 4096;
  MakeRows rows = Rows::batch;
  std::vector<std::string> options;  // "train.objective=mlm": as on a command line, after all of the above
  std::string checkpoint;            // a step folder to start from; "" = initial values
  /// Called once on every rank when the last step is done.
  std::function<void(const ParameterStore&, const Mesh&)> finish;
  /// The stop signal that a rank sees when it looks for it once more in a step (`look` from 0); none without.
  std::function<int(int rank, int look)> signal;
  Sabotaged::Plan sabotage;
  /// For other negative controls: may change gradients (after their reduction) or weights of a rank.
  std::function<void(ParameterStore&, const Mesh&, std::int64_t step)> meddle;

  [[nodiscard]] std::string text() const {
    std::string text = layout.text();
    if (virtual_stages > 1) text += concat("·v", virtual_stages);
    if (zero) text += " zero";
    if (sequence_parallel) text += " sp";
    if (recompute != "none") text += " recompute=" + recompute;
    if (schedule != "auto") text += " " + schedule;
    if (!overlap) text += " no overlap";
    return text;
  }
};

/// What a rank holds, in elements and bytes; `masters` that are no working copy.
struct RankSizes {
  std::int64_t parameters = 0;
  double weights = 0, gradients = 0, masters = 0, states = 0;
};

struct TrainingResult {
  std::vector<std::string> messages;                  // by rank, "" = fine
  std::vector<double> losses, norms;                  // by step, rank 0's
  bool norms_agree = true;                            // the same bits on every rank
  std::map<std::string, at::Tensor> first_gradients;  // of the loss sum, reduced, before clipping
  std::map<std::string, at::Tensor> initial, final;
  std::map<std::string, std::map<std::string, at::Tensor>> states;  // by the optimizer's name for them
  std::map<int, std::pair<bool, int>> stopped;  // by rank: whether the step that a signal came in was completed, signal
  std::map<int, RankSizes> sizes;               // by rank
  std::map<std::string, double> bytes_per_step;   // "group operation" -> all ranks together
  std::vector<double> state_bytes;                // masters and moments, by rank
  std::vector<at::Tensor> tied_first, tied_last;  // of data and tensor rank 0, after every step

  [[nodiscard]] bool fine() const {
    return std::all_of(messages.begin(), messages.end(), [](const std::string& m) { return m.empty(); });
  }
};

namespace detail {

using PieceOf = std::function<at::Tensor(const ParameterStore::OwnedRange&)>;
inline PieceOf masters() {
  return [](const ParameterStore::OwnedRange& range) { return range.master; };
}
inline PieceOf gradients() {
  return [](const ParameterStore::OwnedRange& range) { return range.grad; };
}
/// Undefined where the parameter has no such state.
inline PieceOf state(const std::string& name) {
  return [name](const ParameterStore::OwnedRange& range) {
    for (const NamedTensor& each : range.states) {
      if (each.name == name) return each.tensor;
    }
    return at::Tensor();
  };
}

// Adds this rank's owned parts of all parameters to full tensors.
inline void collect(const ParameterStore& store, const PieceOf& kind, std::map<std::string, at::Tensor>& into) {
  for (ParamId id = 0; id < store.size(); ++id) {
    const ParamSpec& spec = store.spec(id);
    const std::vector<ParameterStore::OwnedRange> owned = store.owned(id);
    if (!spec.traits.counts || owned.empty() || !kind(owned[0]).defined()) continue;
    at::Tensor& full = into[spec.name];
    if (!full.defined()) full = at::full(spec.global_shape, std::nan(""), at::kDouble);
    // What other ranks have written stays: only the owned elements of the slice change.
    const at::Tensor local = take_slice(full, spec).contiguous().clone();
    const at::Tensor flat = local.view({-1});
    for (const ParameterStore::OwnedRange& range : owned) {
      flat.slice(0, range.begin, range.end).copy_(kind(range).to(at::kDouble));
    }
    put_slice(full, spec, local);
  }
}

}  // namespace detail

inline std::map<std::string, std::map<std::string, at::Tensor>> collect_states(
    const ParameterStore& store, std::map<std::string, std::map<std::string, at::Tensor>> into) {
  std::set<std::string> names;
  for (const FlatBuffers& b : store.buffers()) {
    for (const NamedTensor& each : b.states) names.insert(each.name);
  }
  for (const std::string& name : names) detail::collect(store, detail::state(name), into[name]);
  return into;
}

inline RankSizes sizes_of(const ParameterStore& store) {
  RankSizes sizes;
  for (ParamId id = 0; id < store.size(); ++id) sizes.parameters += store.local_numel(id);
  for (const FlatBuffers& b : store.buffers()) {
    sizes.weights += static_cast<double>(b.working.nbytes());
    sizes.gradients += static_cast<double>(b.grad.nbytes());
    if (!b.owned_grad.is_alias_of(b.grad)) sizes.gradients += static_cast<double>(b.owned_grad.nbytes());
    if (!b.master.is_same(b.working)) sizes.masters += static_cast<double>(b.master.nbytes());
    sizes.states += static_cast<double>(b.state_bytes());
  }
  return sizes;
}

inline Config training_config(const TrainingSetup& setup) {
  Config config;
  config.model = setup.model;
  config.model.recompute = setup.recompute;
  config.model.dropout = setup.dropout;
  config.run.seed = 5;
  config.train.micro_batch_size = setup.micro_batch;
  config.train.batch_size = config.train.batch_quantum = setup.batch_size;
  config.train.batch_ramp = 0;
  config.parallel.tensor = setup.layout.tensor;
  config.parallel.pipeline = setup.layout.pipeline;
  config.parallel.virtual_stages = setup.virtual_stages;
  config.parallel.schedule = setup.schedule;
  config.parallel.split = setup.split;
  config.parallel.sequence_parallel = setup.sequence_parallel;
  config.parallel.zero = setup.zero ? 1 : 0;
  config.parallel.overlap = setup.overlap;
  config.train.precision = precision_name(setup.precision);
  OptionTable table;
  add_train_options(table, config);
  for (const std::string& option : setup.options) table.apply_override(option);
  return config;
}

inline Partition partition_of(const TrainingSetup& setup, const Mesh& mesh) {
  if (!setup.zero) return {0, 1, setup.bucket_elements};
  return {mesh.place().dp_rank, setup.layout.data, setup.bucket_elements};
}

/// Trains on one rank of `world` and writes what it has into `result` under `mutex`.
inline void train_rank(Communicator& world, const TrainingSetup& setup, TrainingResult& result, std::mutex& mutex) {
  const at::NoGradGuard no_grad;
  at::set_num_threads(1);  // of this thread: ranks are threads already
  const Config config = resolve_train_config(training_config(setup), setup.layout);
  Sabotaged device_world(world, setup.sabotage, "device world");
  const Mesh mesh(world, setup.layout, device_world);
  ParameterStore store;
  cram::Model model(config.model, store, make_placement(config, mesh), config.train.objective);
  store.allocate(setup.precision, setup.device, state_layout(config.train.optimizer), partition_of(setup, mesh));
  if (setup.checkpoint.empty()) {
    store.initialize(11);
  } else {
    load_checkpoint(setup.checkpoint, store, mesh,
                    {.elsewhere = parameter_names(config.model, config.train.objective)});
  }
  RowsSource source(config.model, setup.micro_batch, mesh.place().dp_rank, setup.layout.data, setup.rows);
  TrainingStep training_step(model, store, mesh, training_step_settings(config), source);
  {
    const std::lock_guard lock(mutex);
    detail::collect(store, detail::masters(), result.initial);
    double bytes = 0;
    for (const FlatBuffers& b : store.buffers()) {
      bytes += static_cast<double>(b.master.nbytes()) + static_cast<double>(b.state_bytes());
    }
    result.sizes[world.rank()] = sizes_of(store);
    result.state_bytes[static_cast<std::size_t>(world.rank())] = bytes;
  }
  const std::int64_t micro_batches = setup.batch_size / (setup.micro_batch * setup.layout.data);
  const std::vector<std::pair<std::string, Communicator*>> groups = {
      {"tensor", &mesh.tensor()}, {"data", &mesh.data()}, {"pipeline", &mesh.pipeline()}, {"tied", &mesh.tied()}};
  for (std::int64_t step = 1; step <= setup.steps; ++step) {
    for (const auto& [name, group] : groups) group->trace().reset_bytes();
    TrainingStep::Watch watch;
    int look = 0;
    watch.signal = [&] { return setup.signal ? setup.signal(world.rank(), look++) : 0; };
    watch.reduced = [&] {
      if (setup.meddle) setup.meddle(store, mesh, step);
      if (step > 1) return;
      const std::lock_guard lock(mutex);
      detail::collect(store, detail::gradients(), result.first_gradients);
    };
    const TrainingStep::Result done = training_step.run({.step = step,
                                                         .update = step,
                                                         .first_sample = (step - 1) * setup.batch_size,
                                                         .micro_batches = micro_batches,
                                                         .lr = 1e-2},
                                                        watch);
    if (done.signal != 0) {
      for (const FlatBuffers& b : store.buffers()) require(b.grad.eq(0).all().item<bool>(), "gradients stay");
      const std::lock_guard lock(mutex);
      result.stopped[world.rank()] = {done.completed, done.signal};
      detail::collect(store, detail::masters(), result.final);
      return;
    }
    require(done.completed && done.finite, "nobody asked to stop");
    const at::Tensor norms = at::empty({world.size()}, at::kDouble);
    world.all_gather(norms, at::full({1}, done.grad_norm, at::kDouble));
    {
      const std::lock_guard lock(mutex);
      if (step == 1) {
        for (const auto& [name, group] : groups) {
          for (const auto& [operation, bytes] : group->trace().bytes()) {
            result.bytes_per_step[name + " " + operation] += bytes;
          }
        }
      }
      if (world.rank() == 0) {
        result.losses.push_back(done.loss);
        result.norms.push_back(done.grad_norm);
        result.norms_agree = result.norms_agree && norms.eq(done.grad_norm).all().item<bool>();
      }
      const bool watched = mesh.place().dp_rank == 0 && mesh.place().tp_rank == 0 && setup.layout.pipeline > 1;
      if (watched && (mesh.is_first_stage() || mesh.is_last_stage())) {
        const at::Tensor copy = store.weight(store.find("encoder.embedding.word_embedding.weight")).clone();
        (mesh.is_first_stage() ? result.tied_first : result.tied_last).push_back(copy);
      }
    }
  }
  if (setup.sabotage.group.empty()) check_replicas(store, mesh, setup.steps);
  if (setup.finish) setup.finish(store, mesh);
  const std::lock_guard lock(mutex);
  detail::collect(store, detail::masters(), result.final);
  result.states = collect_states(store, std::move(result.states));
}

/// All ranks of the layout as threads.
inline TrainingResult train(const TrainingSetup& setup) {
  TrainingResult result;
  result.state_bytes.resize(static_cast<std::size_t>(setup.layout.world_size()));
  std::mutex mutex;
  result.messages =
      run_ranks(setup.layout.world_size(), [&](Communicator& world) { train_rank(world, setup, result, mutex); });
  return result;
}

/// Largest over all tensors of ||a - b|| / ||a||, and its name.
inline std::pair<double, std::string> worst_norm_error(const std::map<std::string, at::Tensor>& expected,
                                                       const std::map<std::string, at::Tensor>& found) {
  std::pair<double, std::string> worst{0, ""};
  if (expected.size() != found.size()) return {1e300, "another number of tensors"};
  for (const auto& [name, tensor] : expected) {
    const auto other = found.find(name);
    const double error = other == found.end() ? 1e300 : norm_error(other->second, tensor);
    if (!(error <= worst.first)) worst = {error, name};
  }
  return worst;
}

/// Largest |found - expected| / |expected|; a NaN counts as the largest, as do different lengths.
inline double worst_relative(const std::vector<double>& expected, const std::vector<double>& found) {
  if (expected.size() != found.size()) return 1e300;
  double worst = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double difference = std::abs(found[i] - expected[i]) / std::abs(expected[i]);
    worst = std::isnan(difference) ? 1e300 : std::max(worst, difference);
  }
  return worst;
}

}  // namespace cram::test
