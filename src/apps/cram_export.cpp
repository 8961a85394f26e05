// cram_export: writes a trained encoder for other programs.
#include <ATen/core/grad_mode.h>

#include <cstdio>
#include <filesystem>
#include <optional>

#include "apps/program.h"
#include "base/log.h"
#include "base/options.h"
#include "base/version.h"
#include "eval/export.h"

namespace {

int run(int argc, char** argv) {
  const cram::CommandLine command(
      "cram_export",
      {{"checkpoint", "run folder (its newest valid checkpoint), step folder or safetensors file", true},
       {"output", "folder to write into", true},
       {"format", "cramming: safetensors with the public crammed-bert names", true},
       {"sample", "also write sample.safetensors: N validation rows and their logits", true},
       {"shards", "prepared folder for --sample; default: the one the run was trained on", true}},
      argc, argv);
  const std::string usage = "cram_export --checkpoint PATH --output DIR --format cramming [--sample N]";
  if (command.has("help")) {
    std::fputs(command.help(usage, "").c_str(), stdout);
    return 0;
  }
  if (command.has("version")) {
    std::puts(cram::version_line("cram_export").c_str());
    return 0;
  }
  constexpr cram::ExitCode kUsage = cram::ExitCode::kUsage;
  CRAM_CHECK(command.arguments().empty(), kUsage, "unexpected argument ", command.arguments().front(),
             "; usage: ", usage);
  for (const char* needed : {"checkpoint", "output"}) {
    CRAM_CHECK(command.has(needed), kUsage, "--", needed, " is missing; usage: ", usage);
  }
  const std::string format = command.value("format", "cramming");
  CRAM_CHECK(format == "cramming", kUsage, "--format ", format, " is unknown, expected cramming");

  const at::NoGradGuard no_grad;
  const std::string output = command.value("output");
  cram::LoadedModel model = cram::load_model(command.value("checkpoint"), cram::Precision::kFp32, at::Device(at::kCPU));
  // Everything is checked before anything is written.
  std::optional<cram::ShardSet> validation;
  std::int64_t rows = 0;
  if (command.has("sample")) {
    rows = cram::parse_integer(command.value("sample"), "--sample");
    const auto known = model.info.settings.find("data.shards");
    const std::string shards = command.value("shards", known == model.info.settings.end() ? "" : known->second);
    CRAM_CHECK(!shards.empty(), kUsage, "--sample needs --shards: this checkpoint does not say what it was trained on");
    validation.emplace(cram::ShardSet::open(shards, "validation"));
    CRAM_CHECK(
        validation->vocab_size() == model.config.vocab_size && validation->seq_length() == model.config.seq_length,
        kUsage, shards, " has V=", validation->vocab_size(), " S=", validation->seq_length(),
        ", the model V=", model.config.vocab_size, " S=", model.config.seq_length,
        "; give the run's own folder with --shards");
    CRAM_CHECK(rows >= 1 && rows <= validation->rows(), kUsage, "--sample ", rows, ": the validation split has ",
               validation->rows(), " rows, expected 1 to that many");
  }
  const std::filesystem::path old_sample = std::filesystem::path(output) / "sample.safetensors";
  if (std::filesystem::exists(old_sample)) {
    // It belongs to the model that is about to be replaced.
    std::filesystem::remove(old_sample);
    cram::say("removed ", old_sample.string(), " of an earlier export");
  }
  cram::export_cramming(model, output);
  cram::say("wrote ", output, "/model.safetensors from ", model.origin);
  if (validation) {
    cram::export_sample(model, *validation, rows, output);
    cram::say("wrote ", old_sample.string(), ": ", rows, " validation rows and their logits");
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return cram::guarded_main("cram_export", [&] { return run(argc, argv); });
}
