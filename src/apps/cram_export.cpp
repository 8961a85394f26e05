// cram_export: writes a trained encoder for other programs.
#include <ATen/core/grad_mode.h>

#include <cstdio>

#include "apps/program.h"
#include "base/log.h"
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
  cram::export_cramming(model, output);
  cram::say("wrote ", output, "/model.safetensors from ", model.origin);
  if (command.has("sample")) {
    const auto rows = cram::parse_integer(command.value("sample"), "--sample");
    const auto known = model.info.settings.find("data.shards");
    const std::string shards = command.value("shards", known == model.info.settings.end() ? "" : known->second);
    cram::ShardSet validation = cram::ShardSet::open(shards, "validation");
    CRAM_CHECK(validation.vocab_size() == model.config.vocab_size && validation.seq_length() == model.config.seq_length,
               kUsage, shards, " has V=", validation.vocab_size(), " S=", validation.seq_length(),
               ", the model V=", model.config.vocab_size, " S=", model.config.seq_length,
               "; give the run's own folder with --shards");
    cram::export_sample(model, validation, rows, output);
    cram::say("wrote ", output, "/sample.safetensors: ", rows, " validation rows and their logits");
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return cram::guarded_main("cram_export", [&] { return run(argc, argv); });
}
