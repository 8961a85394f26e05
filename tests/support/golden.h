// The golden files of tests/reference: reading them, and building the model they describe.
#pragma once

#include <gtest/gtest.h>
#include <torch/types.h>

#include <cstring>
#include <map>
#include <string>

#include "base/safetensors.h"
#include "model/model.h"
#include "parallel/mesh.h"

namespace cram::test {

/// All tensors of a safetensors file of F64, F32 and I64.
inline std::map<std::string, at::Tensor> read_tensors(const SafetensorsFile& file) {
  std::map<std::string, at::Tensor> tensors;
  for (const auto& [name, entry] : file.entries()) {
    const at::ScalarType type = entry.dtype == "F64" ? at::kDouble : entry.dtype == "F32" ? at::kFloat : at::kLong;
    CRAM_CHECK(entry.dtype == "F64" || entry.dtype == "F32" || entry.dtype == "I64", ExitCode::kOther, "dtype ",
               entry.dtype);
    const at::Tensor tensor = at::empty(entry.shape, type);
    if (tensor.numel() > 0) std::memcpy(tensor.data_ptr(), file.data(entry), entry.end - entry.begin);
    tensors[name] = tensor;
  }
  return tensors;
}

struct Golden {
  ModelConfig config;
  std::map<std::string, at::Tensor> tensors;

  explicit Golden(const std::string& name) {
    const SafetensorsFile file =
        SafetensorsFile::open(std::string(CRAM_SOURCE_DIR) + "/tests/reference/golden/" + name + ".safetensors");
    const auto number = [&](const char* key) { return std::stoll(file.metadata().at(key)); };
    config.layers = number("layers");
    config.hidden = number("hidden");
    config.heads = number("heads");
    config.ffn = number("ffn");
    config.vocab_size = number("vocab_size");
    config.seq_length = number("seq_length");
    tensors = read_tensors(file);
  }
  [[nodiscard]] const at::Tensor& at(const std::string& name) const { return tensors.at(name); }
  [[nodiscard]] double number(const std::string& name) const { return at(name).item<double>(); }
};

/// A model's shape in one line.
inline ModelConfig model_of(std::int64_t layers, std::int64_t hidden, std::int64_t heads, std::int64_t ffn,
                            std::int64_t vocab_size, std::int64_t seq_length) {
  ModelConfig config;
  config.layers = layers;
  config.hidden = hidden;
  config.heads = heads;
  config.ffn = ffn;
  config.vocab_size = vocab_size;
  config.seq_length = seq_length;
  return config;
}

/// The group of this process alone, for what wants a group.
inline Communicator& self_group() {
  static const std::unique_ptr<Communicator> group = make_self_communicator();
  return *group;
}

/// One rank, for what wants a mesh.
inline const Mesh& self_mesh() {
  static const Mesh mesh(self_group(), Layout{});
  return mesh;
}

/// What AdamW keeps, for tests below the room that knows optimizers.
inline StateLayout adam_states() {
  return {.states = [](const ParamClass&) -> std::vector<std::string> { return {"exp_avg", "exp_avg_sq"}; }};
}

inline Batch batch_of(const at::Tensor& ids, const at::Tensor& positions, const at::Tensor& labels,
                      const at::Tensor& lengths = at::Tensor()) {
  Batch batch(ids.size(0), ids.size(1),
              {{std::string(field::kIds), ids},
               {std::string(field::kPositions), positions},
               {std::string(field::kLabels), labels}});
  if (lengths.defined()) batch.set(field::kLengths, lengths);
  return batch;
}

/// One training micro-batch where all blocks are on this rank: adds the gradient of the loss sum, returns the sum.
inline at::Tensor forward_backward(cram::Model& model, const Batch& batch) {
  const MicroBatch micro_batch = model.micro_batch(batch);
  const int blocks = model.encoder().blocks();
  std::vector<cram::Model::BlockSaved> saved(static_cast<std::size_t>(blocks));
  at::Tensor x;
  for (int b = 0; b < blocks; ++b) x = model.forward(b, micro_batch, x, saved[static_cast<std::size_t>(b)]);
  for (int b = blocks; b-- > 0;) x = model.backward(b, micro_batch, x, saved[static_cast<std::size_t>(b)], {});
  return saved.back().loss_sum;
}

/// The last hidden states, normalised, of the picked rows or of all, where all blocks are on this rank.
inline at::Tensor last_hidden(cram::Model& model, const Batch& batch, const at::Tensor& picks = at::Tensor()) {
  const MicroBatch micro_batch{batch, picks, {}};
  at::Tensor x;
  for (int b = 0; b < model.encoder().blocks(); ++b) x = model.encoder().forward_block(b, micro_batch, x, nullptr);
  return x;
}

/// A model with its store, on one rank.
struct Model {
  ParameterStore store;
  cram::Model model;

  Model(const ModelConfig& config, Precision precision) : model(config, store) {
    store.allocate(precision, at::kCPU, adam_states());
    store.initialize(0);
  }
  at::Tensor forward_backward(const at::Tensor& ids, const at::Tensor& positions, const at::Tensor& labels) {
    return test::forward_backward(model, batch_of(ids, positions, labels));
  }
  Objective::Evaluation evaluate(const at::Tensor& ids, const at::Tensor& positions, const at::Tensor& labels) {
    const Batch batch = batch_of(ids, positions, labels);
    return model.objective().evaluate(last_hidden(model, batch, positions), batch);
  }
  at::Tensor logits(const at::Tensor& ids, const at::Tensor& positions) {
    return model.objective().outputs(last_hidden(model, batch_of(ids, positions, positions), positions));
  }
  at::Tensor hidden(const at::Tensor& ids) {
    return last_hidden(model, batch_of(ids, {}, {})).view({ids.size(0), ids.size(1), -1});
  }
  /// Copies the golden tensors `prefix`<parameter name> to the masters.
  void load(const Golden& golden, const std::string& prefix = "weight.") {
    for (ParamId id = 0; id < store.size(); ++id) store.master(id).copy_(golden.at(prefix + store.spec(id).name));
    store.refresh_working();
  }
};

/// max|found - expected| / max|expected|: the distance of two tensors relative to the larger one's scale.
inline double relative_error(const at::Tensor& found, const at::Tensor& expected) {
  if (found.sizes() != expected.sizes()) return 1e300;
  const double scale = expected.to(at::kDouble).abs().max().item<double>();
  const double distance = (found.to(at::kDouble) - expected.to(at::kDouble)).abs().max().item<double>();
  return std::isnan(distance) ? 1e300 : distance / std::max(scale, 1e-300);
}

/// ||found - expected|| / ||expected||
inline double norm_error(const at::Tensor& found, const at::Tensor& expected) {
  const double scale = expected.to(at::kDouble).norm().item<double>();
  const double distance = (found.to(at::kDouble) - expected.to(at::kDouble)).norm().item<double>();
  return std::isnan(distance) ? 1e300 : distance / std::max(scale, 1e-300);
}

}  // namespace cram::test
