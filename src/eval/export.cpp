#include "eval/export.h"

#include <torch/types.h>

#include <filesystem>
#include <set>

#include "base/check.h"
#include "base/file_io.h"
#include "base/log.h"
#include "base/options.h"
#include "base/safetensors.h"
#include "model/weights_io.h"
#include "train/forward_pass.h"

namespace cram {
namespace {

// ---- cramming: model.safetensors with the public crammed-bert tensor names (fp32 masters)

// The public names are those of one architecture; a file of another would be read by nobody.
void check_cramming(const LoadedModel& model) {
  const ModelConfig recipe;
  for (const auto& [key, value, expected] : {std::tuple{"model.positions", model.config.positions, recipe.positions},
                                             std::tuple{"model.structure", model.config.structure, recipe.structure}}) {
    CRAM_CHECK(value == expected, ExitCode::kUsage, "--format cramming has names for ", key, "=", expected,
               " only, this model has ", key, "=", value, "; choose another --format");
  }
  const std::set<std::string> names = parameter_names(model.config);
  for (ParamId id = 0; id < model.store->size(); ++id) {
    const std::string& name = model.store->spec(id).name;
    CRAM_CHECK(names.count(name) > 0, ExitCode::kUsage, "--format cramming has no name for ", name,
               ", which this model's objective has; choose another --format");
  }
}

void write_cramming(LoadedModel& model, const std::string& output) {
  const std::string path = output + "/model.safetensors";
  export_weights(path, model.config, *model.store);
  say("wrote ", path, " from ", model.origin);
}

const ExportFormat& known_format(const std::string& name) {
  const ExportFormat* format = export_formats().find(name);
  if (format != nullptr) return *format;
  const std::vector<std::string> names = export_formats().names();
  std::string all;
  for (const std::string& each : names) all += (all.empty() ? "" : ", ") + each;
  fail(ExitCode::kUsage, "--format ", name, " is unknown, expected one of ", all, "; did you mean ",
       nearest_name(name, names), "?");
}

// The rows of --sample: those of the folder asked for, or of the run's own.
ShardSet open_sample(const ExportRequest& request, const LoadedModel& model) {
  const auto known = model.info.settings.find("data.shards");
  const std::string own = known == model.info.settings.end() ? "" : known->second;
  const std::string shards = request.shards.empty() ? own : request.shards;
  CRAM_CHECK(!shards.empty(), ExitCode::kUsage,
             "--sample needs --shards: this checkpoint does not say what it was trained on");
  ShardSet validation = ShardSet::open(shards, "validation");
  CRAM_CHECK(validation.vocab_size() == model.config.vocab_size && validation.seq_length() == model.config.seq_length,
             ExitCode::kUsage, shards, " has V=", validation.vocab_size(), " S=", validation.seq_length(),
             ", the model V=", model.config.vocab_size, " S=", model.config.seq_length,
             "; give the run's own folder with --shards");
  const std::int64_t rows = *request.sample_rows;
  CRAM_CHECK(rows >= 1 && rows <= validation.rows(), ExitCode::kUsage, "--sample ", rows, ": the validation split has ",
             validation.rows(), " rows, expected 1 to that many");
  return validation;
}

}  // namespace

Table<ExportFormat>& export_formats() {
  static Table<ExportFormat> table("export format", {{"cramming", "safetensors with the public crammed-bert names",
                                                      write_cramming, check_cramming}});
  return table;
}

void export_model(const ExportRequest& request) {
  // Everything is checked before anything is written.
  const ExportFormat& format = known_format(request.format);
  LoadedModel model = load_model(request.checkpoint, Precision::kFp32, at::Device(at::kCPU));
  if (format.check != nullptr) format.check(model);
  std::optional<ShardSet> validation;
  if (request.sample_rows) validation.emplace(open_sample(request, model));
  const std::filesystem::path old_sample = std::filesystem::path(request.output) / "sample.safetensors";
  if (std::filesystem::exists(old_sample)) {
    // It belongs to the model that is about to be replaced.
    std::filesystem::remove(old_sample);
    say("removed ", old_sample.string(), " of an earlier export");
  }
  make_folders(request.output);
  format.write(model, request.output);
  if (!validation) return;
  export_sample(model, *validation, *request.sample_rows, request.output);
  say("wrote ", old_sample.string(), ": ", *request.sample_rows, " validation rows and their logits");
}

void export_sample(LoadedModel& model, ShardSet& validation, std::int64_t rows, const std::string& output) {
  CRAM_CHECK(rows >= 1 && rows <= validation.rows(), ExitCode::kUsage, "--sample ", rows, ": the validation split has ",
             validation.rows(), " rows");
  const std::int64_t seq = validation.seq_length();
  std::vector<std::uint32_t> ids(static_cast<std::size_t>(rows * seq));
  validation.read_rows(0, rows, ids.data());
  const std::vector<std::int64_t> wide(ids.begin(), ids.end());
  const at::Tensor input = at::tensor(wide, at::kLong).view({rows, seq});
  const std::unique_ptr<Communicator> alone = make_self_communicator();
  ForwardPass pass(*model.model, *model.store, *alone);
  const at::Tensor logits =
      pass.outputs(input, at::arange(rows * seq, at::kLong)).to(at::kFloat).cpu().contiguous();  // [N*S,V]
  make_folders(output);
  write_safetensors(output + "/sample.safetensors",
                    {{"input_ids", "I64", {rows, seq}, input.const_data_ptr()},
                     {"logits", "F32", {rows, seq, logits.size(1)}, logits.const_data_ptr()}},
                    {{"format", "pt"}});
}

}  // namespace cram
