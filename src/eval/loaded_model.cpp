#include "eval/loaded_model.h"

#include <filesystem>

#include "base/check.h"
#include "base/log.h"
#include "base/options.h"
#include "model/weights_io.h"

namespace cram {
namespace {

namespace fs = std::filesystem;

// Step folders to try, the newest first. Reading never changes the run's folder, so a damaged one stays in place.
std::vector<std::string> steps_of(const std::string& path) {
  if (fs::exists(fs::path(path) / kCheckpointManifest)) return {path};
  std::vector<std::string> all = CheckpointFolder(path + "/checkpoints").committed();
  CRAM_CHECK(!all.empty(), ExitCode::kNoCheckpoint, path, " has no committed checkpoint in checkpoints/");
  return {all.rbegin(), all.rend()};
}

}  // namespace

LoadedModel load_model(const std::string& checkpoint, Precision precision, at::Device device) {
  const fs::path path(checkpoint);
  LoadedModel model;
  Precision format = precision;
  std::string objective = "mlm";
  const auto build = [&] {
    check_model_config(model.config);
    model.model.reset();  // of a checkpoint that turned out damaged
    model.store = std::make_unique<ParameterStore>();
    model.model = std::make_unique<Model>(model.config, *model.store, objective);
    model.store->allocate(format, device);
  };
  const bool exported = fs::is_directory(path) && fs::exists(path / "model.safetensors");
  if (exported || fs::is_regular_file(path)) {
    model.origin = exported ? (path / "model.safetensors").string() : checkpoint;
    model.config = model_config_of(model.origin);
    build();
    load_weights(model.origin, model.config, *model.store);
    return model;
  }
  CRAM_CHECK(fs::is_directory(path), ExitCode::kNoCheckpoint, checkpoint,
             " is neither a folder nor a file; name a run folder, one of its ",
             "checkpoints/step-*, or a safetensors file");
  std::string reasons;
  for (const std::string& step : steps_of(checkpoint)) {
    try {
      model.origin = step;
      model.info = read_checkpoint_manifest(step).info;
      OptionTable table;
      model.config = ModelConfig();
      add_model_options(table, model.config);
      for (const auto& [key, value] : model.info.settings) {
        if (table.find(key) != nullptr) table.set(key, value, step);
      }
      const auto trained_for = model.info.settings.find("train.objective");
      if (trained_for != model.info.settings.end()) objective = trained_for->second;
      // The masters of an fp64 run are fp64; they are read as they are.
      const auto saved = model.info.settings.find("train.precision");
      format = saved != model.info.settings.end() && saved->second == "fp64" ? Precision::kFp64 : precision;
      build();
      load_checkpoint(step, *model.store);
      if (!reasons.empty()) log_warning("newer checkpoints do not verify, taking ", step, ":", reasons);
      return model;
    } catch (const CheckpointDamage& damage) {
      reasons += concat("\n  ", step, ": ", damage.what());
    }
  }
  fail(ExitCode::kNoCheckpoint, "no valid checkpoint in ", checkpoint, ":", reasons);
}

}  // namespace cram
