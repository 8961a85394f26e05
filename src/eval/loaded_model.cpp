#include "eval/loaded_model.h"

#include <filesystem>

#include "base/check.h"
#include "base/options.h"

namespace cram {
namespace {

namespace fs = std::filesystem;

// The newest checkpoint of a run that verifies. Reading never changes the run's folder, so a damaged one stays in place.
std::string newest_of_run(const std::string& run_folder) {
  const std::vector<std::string> all = CheckpointFolder(run_folder + "/checkpoints").committed();
  CRAM_CHECK(!all.empty(), ExitCode::kNoCheckpoint, run_folder, " has no committed checkpoint in checkpoints/");
  std::string reasons;
  for (auto step = all.rbegin(); step != all.rend(); ++step) {
    try {
      (void)verify_checkpoint(*step);
      return *step;
    } catch (const Error& error) {
      reasons += concat("\n  ", *step, ": ", error.what());
    }
  }
  fail(ExitCode::kNoCheckpoint, "no valid checkpoint in ", run_folder, ":", reasons);
}

}  // namespace

LoadedModel load_model(const std::string& checkpoint, Precision precision, at::Device device) {
  CRAM_CHECK(fs::is_directory(checkpoint), ExitCode::kNoCheckpoint, checkpoint,
             " is not a folder; name a run folder or one of its checkpoints/step-*");
  const bool is_step = fs::exists(fs::path(checkpoint) / "manifest.json");
  LoadedModel model;
  model.step_folder = is_step ? checkpoint : newest_of_run(checkpoint);
  model.info = verify_checkpoint(model.step_folder);
  OptionTable table;
  add_model_options(table, model.config);
  for (const auto& [key, value] : model.info.settings) {
    if (table.find(key) != nullptr) table.set(key, value, model.step_folder);
  }
  check_model_config(model.config);
  model.store = std::make_unique<ParameterStore>();
  model.encoder = std::make_unique<Encoder>(model.config, *model.store);
  model.store->allocate(precision, device, /*with_optimizer=*/false);
  load_checkpoint(model.step_folder, *model.store);
  return model;
}

}  // namespace cram
