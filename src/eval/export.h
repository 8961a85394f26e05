// Export of a trained encoder for other programs.
#pragma once

#include <string>

#include "data/shard_set.h"
#include "eval/loaded_model.h"

namespace cram {

/// `output`/model.safetensors with the public crammed-bert tensor names (fp32 masters). Written whole or not at all.
void export_cramming(const LoadedModel& model, const std::string& output);

/// `output`/sample.safetensors: input_ids [N,S] (int64, validation rows, unmasked) and this program's fp32 logits
/// [N,S,V], so that a reader elsewhere can compare.
void export_sample(LoadedModel& model, ShardSet& validation, std::int64_t rows, const std::string& output);

}  // namespace cram
