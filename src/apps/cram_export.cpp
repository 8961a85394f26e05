// cram_export: writes a trained encoder for other programs.
#include <ATen/core/grad_mode.h>

#include <cstdio>
#include <string>

#include "apps/program.h"
#include "base/check.h"
#include "eval/export.h"

namespace {

int run(int argc, char** argv) {
  const cram::CommandLine command(
      "cram_export",
      {{"checkpoint", "run folder (its newest valid checkpoint), step folder or safetensors file", true},
       {"output", "folder to write into", true},
       {"format", "what to write, from the list below; default: cramming", true},
       {"sample", "also write sample.safetensors: N validation rows and their logits", true},
       {"shards", "prepared folder for --sample; default: the one the run was trained on", true}},
      argc, argv);
  const std::string usage = "cram_export --checkpoint PATH --output DIR [--format NAME] [--sample N]";
  std::string formats = "formats:\n";
  for (const cram::ExportFormat& format : cram::export_formats().rows()) {
    formats += "  " + format.name + ": " + format.help + "\n";
  }
  if (command.answered(usage, formats)) return 0;
  CRAM_CHECK(command.arguments().empty(), cram::ExitCode::kUsage, "unexpected argument ", command.arguments().front(),
             "; usage: ", usage);
  const at::NoGradGuard no_grad;
  cram::ExportRequest request{.checkpoint = command.required("checkpoint"),
                              .output = command.required("output"),
                              .format = command.value("format", "cramming"),
                              .shards = command.value("shards")};
  if (command.has("sample")) request.sample_rows = command.integer("sample", 0);
  cram::export_model(request);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return cram::guarded_main("cram_export", [&] { return run(argc, argv); });
}
