// cram_export: writes a trained encoder for other programs.
#include <ATen/core/grad_mode.h>

#include <cstdio>
#include <string>

#include "apps/program.h"
#include "base/options.h"
#include "base/version.h"
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
  if (command.has("help")) {
    std::string formats = "formats:\n";
    for (const cram::ExportFormat& format : cram::export_formats().rows()) {
      formats += "  " + format.name + ": " + format.help + "\n";
    }
    std::fputs(command.help(usage, formats).c_str(), stdout);
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
  const at::NoGradGuard no_grad;
  cram::ExportRequest request{.checkpoint = command.value("checkpoint"),
                              .output = command.value("output"),
                              .format = command.value("format", "cramming"),
                              .shards = command.value("shards")};
  if (command.has("sample")) request.sample_rows = cram::parse_integer(command.value("sample"), "--sample");
  cram::export_model(request);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return cram::guarded_main("cram_export", [&] { return run(argc, argv); });
}
