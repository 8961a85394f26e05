// A model rebuilt from what `--checkpoint` may name: a run folder (its newest valid checkpoint), a step folder, a
// safetensors file or a folder with model.safetensors.
#pragma once

#include <memory>
#include <string>

#include "model/model.h"
#include "run/checkpoint.h"

namespace cram {

struct LoadedModel {
  ModelConfig config;
  std::unique_ptr<ParameterStore> store;
  std::unique_ptr<Model> model;
  CheckpointInfo info;  ///< empty for a safetensors file
  std::string origin;   ///< the step folder or file it came from
};

/// `precision` is that of the working weights; a run saved in fp64 is loaded in fp64 whatever is asked.
/// Verifies digests, rebuilds the model from the checkpoint's own settings (or the file's shapes) and loads the
/// masters, without gradients and moments. Throws Error(20) when nothing valid is there.
[[nodiscard]] LoadedModel load_model(const std::string& checkpoint, Precision precision, at::Device device);

}  // namespace cram
