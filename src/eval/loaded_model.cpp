#include "eval/loaded_model.h"

#include <filesystem>

#include "base/check.h"
#include "base/log.h"
#include "base/options.h"
#include "model/weights_io.h"

namespace cram {
namespace {

namespace fs = std::filesystem;

// The newest checkpoint of a run that verifies. Reading never changes the run's folder, so a damaged one stays in
// place.
std::string newest_of_run(const std::string& run_folder) {
  const std::vector<std::string> all = CheckpointFolder(run_folder + "/checkpoints").committed();
  CRAM_CHECK(!all.empty(), ExitCode::kNoCheckpoint, run_folder, " has no committed checkpoint in checkpoints/");
  std::string reasons;
  for (auto step = all.rbegin(); step != all.rend(); ++step) {
    try {
      (void)verify_checkpoint(*step);
      if (!reasons.empty()) log_warning("newer checkpoints do not verify, taking ", *step, ":", reasons);
      return *step;
    } catch (const Error& error) {
      reasons += concat("\n  ", *step, ": ", error.what());
    }
  }
  fail(ExitCode::kNoCheckpoint, "no valid checkpoint in ", run_folder, ":", reasons);
}

}  // namespace

LoadedModel load_model(const std::string& checkpoint, Precision precision, at::Device device) {
  const fs::path path(checkpoint);
  LoadedModel model;
  Precision format = precision;
  std::string objective = "mlm";
  const auto build = [&] {
    check_model_config(model.config);
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
  model.origin = fs::exists(path / "manifest.json") ? checkpoint : newest_of_run(checkpoint);
  model.info = verify_checkpoint(model.origin);
  OptionTable table;
  add_model_options(table, model.config);
  for (const auto& [key, value] : model.info.settings) {
    if (table.find(key) != nullptr) table.set(key, value, model.origin);
  }
  const auto trained_for = model.info.settings.find("train.objective");
  if (trained_for != model.info.settings.end()) objective = trained_for->second;
  // The masters of an fp64 run are fp64; they are read as they are.
  const auto saved = model.info.settings.find("train.precision");
  if (saved != model.info.settings.end() && saved->second == "fp64") format = Precision::kFp64;
  build();
  load_checkpoint(model.origin, *model.store);
  return model;
}

}  // namespace cram
