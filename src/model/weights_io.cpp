#include "model/weights_io.h"

#include <torch/types.h>

#include <cmath>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "base/options.h"
#include "base/safetensors.h"

namespace cram {
namespace {

constexpr ExitCode kBad = ExitCode::kUsage;
constexpr const char* kEmbeddingName = "encoder.embedding.word_embedding.weight";
constexpr const char* kDecoderName = "decoder.weight";
constexpr std::string_view kQueryKeyValue = ".self_attention.query_key_value.weight";
constexpr std::string_view kNormFactor = ".self_attention.norm_factor";

bool ends_with(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

// "encoder.layers.N.attn.self_attention.norm_factor" beside its query_key_value weight.
std::string norm_factor_name(const std::string& query_key_value) {
  return query_key_value.substr(0, query_key_value.size() - kQueryKeyValue.size()) + std::string(kNormFactor);
}

std::optional<at::ScalarType> scalar_type(const std::string& dtype) {
  if (dtype == "F64") return at::kDouble;
  if (dtype == "F32") return at::kFloat;
  if (dtype == "F16") return at::kHalf;
  if (dtype == "BF16") return at::kBFloat16;
  return std::nullopt;
}

// A copy of the tensor, because the mapped bytes need not be aligned.
at::Tensor read_tensor(const SafetensorsFile& file, const SafetensorsEntry& entry, at::ScalarType dtype) {
  const at::Tensor tensor = at::empty(entry.shape, dtype);
  if (tensor.numel() > 0) std::memcpy(tensor.data_ptr(), file.data(entry), entry.end - entry.begin);
  return tensor;
}

void check_entry(const std::string& path, const std::string& name, const SafetensorsEntry& entry,
                 const std::vector<std::int64_t>& expected) {
  CRAM_CHECK(entry.shape == expected, kBad, path, ": tensor ", name, " has shape ", shape_text(entry.shape),
             ", expected ", shape_text(expected), "; model.* must describe the model that was saved");
  CRAM_CHECK(scalar_type(entry.dtype), kBad, path, ": tensor ", name, " has dtype ", entry.dtype,
             ", expected one of F32, F64, F16, BF16");
}

void check_norm_factor(const SafetensorsFile& file, const std::string& path, const std::string& name,
                       const SafetensorsEntry& entry, std::int64_t head_dim) {
  check_entry(path, name, entry, {});
  const at::ScalarType dtype = *scalar_type(entry.dtype);
  const double found = read_tensor(file, entry, dtype).item<double>();
  const double expected = 1 / std::sqrt(static_cast<double>(head_dim));
  // A 16-bit file cannot hold more than its format does.
  const double tolerance = dtype == at::kBFloat16 ? 0x1p-8 : dtype == at::kHalf ? 0x1p-11 : 1e-6;
  CRAM_CHECK(std::abs(found - expected) <= tolerance * expected, kBad, path, ": tensor ", name, " is ", found,
             ", expected 1/sqrt(", head_dim, ") = ", expected, "; model.heads must be that of the saved model");
}

}  // namespace

void load_weights(const std::string& path, const ModelConfig& config, ParameterStore& store) {
  const SafetensorsFile file = SafetensorsFile::open(path, kBad);
  const SafetensorsEntry* const embedding = file.find(kEmbeddingName);
  const SafetensorsEntry* const decoder = file.find(kDecoderName);
  if (embedding != nullptr && decoder != nullptr) {
    const bool same = embedding->dtype == decoder->dtype && embedding->shape == decoder->shape &&
                      std::memcmp(file.data(*embedding), file.data(*decoder), decoder->end - decoder->begin) == 0;
    CRAM_CHECK(same, kBad, path, ": ", kDecoderName, " and ", kEmbeddingName,
               " differ, expected equal tensors: this model ties its decoder to the embedding");
  }

  // Everything is checked before anything is changed.
  std::vector<std::pair<ParamId, const SafetensorsEntry*>> found;
  for (ParamId id = 0; id < store.size(); ++id) {
    const ParamSpec& spec = store.spec(id);
    const SafetensorsEntry* entry = file.find(spec.name);
    if (entry == nullptr && spec.name == kEmbeddingName) entry = decoder;
    CRAM_CHECK(entry != nullptr, kBad, path, " lacks the tensor ", spec.name, " ", shape_text(spec.global_shape));
    check_entry(path, spec.name, *entry, spec.global_shape);
    found.emplace_back(id, entry);
  }
  for (const auto& [name, entry] : file.entries()) {
    if (store.has(name) || (name == kDecoderName && store.has(kEmbeddingName))) continue;
    const bool is_norm_factor =
        ends_with(name, kNormFactor) &&
        store.has(name.substr(0, name.size() - kNormFactor.size()) + std::string(kQueryKeyValue));
    CRAM_CHECK(is_norm_factor, kBad, path, " has the tensor ", name, " ", shape_text(entry.shape),
               ", which this model has not (model.layers=", config.layers, ")");
    check_norm_factor(file, path, name, entry, config.head_dim());
  }

  for (const auto& [id, entry] : found) {
    const ParamSpec& spec = store.spec(id);
    const at::Tensor full = read_tensor(file, *entry, *scalar_type(entry->dtype));
    store.master(id).copy_(take_slice(full, spec));
  }
  store.refresh_working();
}

void export_weights(const std::string& path, const ModelConfig& config, const ParameterStore& store) {
  const auto norm_factor = static_cast<float>(1 / std::sqrt(static_cast<double>(config.head_dim())));
  std::vector<SafetensorsItem> items;
  std::vector<at::Tensor> kept;  // owns what the items point to
  for (ParamId id = 0; id < store.size(); ++id) {
    const ParamSpec& spec = store.spec(id);
    CRAM_CHECK(store.local_shape(id) == spec.global_shape, ExitCode::kOther, "cannot export ", spec.name,
               ": this rank has ", shape_text(store.local_shape(id)), " of ", shape_text(spec.global_shape),
               ", expected the whole tensor");
    kept.push_back(store.master(id).to(at::kCPU, at::kFloat).contiguous());
    items.push_back({spec.name, "F32", spec.global_shape, kept.back().const_data_ptr()});
    if (ends_with(spec.name, kQueryKeyValue)) items.push_back({norm_factor_name(spec.name), "F32", {}, &norm_factor});
  }
  write_safetensors(path, items, {{"format", "pt"}, {"seq_length", std::to_string(config.seq_length)}});
}

ModelConfig model_config_of(const std::string& path) {
  const SafetensorsFile file = SafetensorsFile::open(path);
  const auto tensor = [&](const std::string& name, std::size_t dims) -> const SafetensorsEntry& {
    const SafetensorsEntry* entry = file.find(name);
    CRAM_CHECK(entry != nullptr && entry->shape.size() == dims, ExitCode::kUsage, path, " has no tensor ", name, " of ",
               dims, " dimensions, so the model's shape is unknown; expected a crammed-bert safetensors file");
    return *entry;
  };
  const SafetensorsEntry& tied = tensor(file.find(kEmbeddingName) != nullptr ? kEmbeddingName : kDecoderName, 2);
  ModelConfig config;
  config.vocab_size = tied.shape[0];
  config.hidden = tied.shape[1];
  config.ffn = tensor("encoder.layers.0.ffn.dense_in.weight", 2).shape[0];
  config.layers = 0;
  while (file.find(concat("encoder.layers.", config.layers, ".ffn.dense_in.weight")) != nullptr) ++config.layers;
  const SafetensorsEntry& factor = tensor("encoder.layers.0.attn.self_attention.norm_factor", 0);
  CRAM_CHECK(factor.dtype == "F32", ExitCode::kUsage, path, ": norm_factor has dtype ", factor.dtype, ", expected F32");
  float norm_factor = 0;
  std::memcpy(&norm_factor, file.data(factor), sizeof norm_factor);
  const auto head_dim = static_cast<std::int64_t>(std::llround(1 / (double{norm_factor} * double{norm_factor})));
  CRAM_CHECK(head_dim > 0 && config.hidden % head_dim == 0, ExitCode::kUsage, path, ": norm_factor ", norm_factor,
             " gives heads of ", head_dim, ", which does not divide the width ", config.hidden);
  config.heads = config.hidden / head_dim;
  const auto seq_length = file.metadata().find("seq_length");
  config.seq_length = seq_length == file.metadata().end() ? 128 : parse_integer(seq_length->second, path);
  check_model_config(config);
  return config;
}

}  // namespace cram
