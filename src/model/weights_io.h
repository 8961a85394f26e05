// Weights in and out: safetensors files with the tensor names of the public crammed-bert checkpoint.
#pragma once

#include <string>

#include "model/model_config.h"
#include "model/parameter_store.h"

namespace cram {

/// Reads every parameter of the store (global shape, any of F64 F32 F16 BF16, this rank's slice) and refreshes the
/// working weights. Beside the parameters a file may hold what follows from them: `decoder.weight`, the tied embedding
/// under its second name (either name will do, both must be equal to the last bit), and
/// `...self_attention.norm_factor`, which must be 1/sqrt(head size). Anything missing, unknown or of another shape is
/// Error(kUsage) naming tensor, expected and got; the store is unchanged then.
void load_weights(const std::string& path, const ModelConfig& config, ParameterStore& store);

/// Writes the masters as F32, whatever the run's precision (an fp64 run is rounded), with the norm_factor scalars and
/// metadata format=pt and seq_length. `decoder.weight` is left out: it shares the embedding's memory, and the format
/// has no shared tensors. Equal weights give equal bytes. The store must hold whole tensors.
void export_weights(const std::string& path, const ModelConfig& config, const ParameterStore& store);

/// The shape of the model in such a file: from the tensors' shapes, the heads from norm_factor, the row length from the
/// metadata (128, the recipe's, where there is none). Error(kUsage) naming what is missing.
[[nodiscard]] ModelConfig model_config_of(const std::string& path);

}  // namespace cram
