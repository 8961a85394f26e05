// cram_bench: measurements of this program on this machine. `cram_bench NAME [section.key=value ...]`
#include <cstdio>

#include "apps/bench/bench.h"
#include "apps/program.h"
#include "base/log.h"
#include "parallel/mpi_environment.h"
#include "train/cpu_memory.h"

namespace cram {
namespace {

std::string help_of_benches() {
  std::string text = "measurements:\n";
  for (const Bench& bench : benches()) text += concat("  ", bench.name, "\n      ", bench.help, "\n");
  return text;
}

void print_result(const BenchResult& result, bool as_json) {
  std::string text = as_json ? "{" : "RESULT";
  for (const auto& [name, value] : result.figures()) {
    if (as_json) {
      text += concat(text.size() > 1 ? "," : "", "\"", name, "\":", format_double17(value));
    } else {
      char number[32];
      std::snprintf(number, sizeof number, "%.6g", value);
      text += concat(" ", name, "=", number);
    }
  }
  std::printf("%s%s\n", text.c_str(), as_json ? "}" : "");
}

int run(int argc, char** argv) {
  CommandLine command("cram_bench",
                      {{"config", "TOML file with options", true},
                       {"json", "print figures as JSON only"},
                       {"seconds", "how long step repeats its step (default 12)", true}},
                      argc, argv);
  Config config;
  OptionTable options;
  add_train_options(options, config);
  if (command.answered("cram_bench NAME [section.key=value ...]", help_of_benches())) return 0;
  CRAM_CHECK(!command.arguments().empty(), ExitCode::kUsage, "which measurement?\n", help_of_benches());
  const std::string& name = command.arguments()[0];
  const Bench* chosen = nullptr;
  for (const Bench& bench : benches()) {
    if (name == bench.name) chosen = &bench;
  }
  CRAM_CHECK(chosen != nullptr, ExitCode::kUsage, "no measurement is called ", name, "\n", help_of_benches());
  if (command.has("config")) options.load_toml_file(command.value("config"));
  std::vector<std::string> paths;
  for (std::size_t i = 1; i < command.arguments().size(); ++i) {
    const std::string& argument = command.arguments()[i];
    if (argument.find('=') == std::string::npos) {
      paths.push_back(argument);
    } else {
      options.apply_override(argument);
    }
  }
  CRAM_CHECK(paths.size() == chosen->paths, ExitCode::kUsage, "cram_bench ", name, " takes ", chosen->paths,
             " names besides section.key=value, got ", paths.size(),
             paths.size() > chosen->paths ? concat(": ", paths.back()) : "");
  const double measure_s = command.number("seconds", BenchContext::kMeasure_s);
  CRAM_CHECK(measure_s > 0 && measure_s <= BenchContext::kLongest_s, ExitCode::kUsage, "--seconds ", measure_s,
             ": expected more than 0 and at most ", BenchContext::kLongest_s);
  CRAM_CHECK(!command.has("seconds") || chosen->takes_seconds, ExitCode::kUsage, "cram_bench ", name,
             " takes no --seconds; step does");
  const Launch launch = detect_launch();
  CRAM_CHECK(launch.world_size == 1 || chosen->takes_ranks, ExitCode::kUsage, "cram_bench ", name,
             " measures one process, and ", launch.world_size, " ranks were started; start it without mpirun");
  configure_log({.rank = launch.rank, .world_size = launch.world_size, .says = !command.has("json")});
  const MpiEnvironment mpi(launch, &argc, &argv);
  return guarded_main("cram_bench",
                      [&] {
                        const std::unique_ptr<Communicator> world =
                            launch.world_size > 1 ? make_mpi_communicator() : make_self_communicator();
                        BenchContext context{config, launch, *world, paths, measure_s};
                        const BenchResult result = chosen->run(context);
                        if (world->rank() == 0) print_result(result, command.has("json"));
                        return 0;
                      },
                      {.after_report = [&](int exit_code) {
                        if (launch.world_size > 1) mpi.abort(exit_code);
                      }});
}

}  // namespace
}  // namespace cram

int main(int argc, char** argv) {
  cram::install_cpu_memory();
  return cram::guarded_main("cram_bench", [&] { return cram::run(argc, argv); });
}
