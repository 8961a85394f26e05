// cram_train: pretrains the encoder. Without --config it is the one-day recipe.
#include <cstdio>

#include "apps/program.h"
#include "apps/train_session.h"
#include "base/check.h"
#include "base/log.h"
#include "base/options.h"
#include "base/version.h"
#include "parallel/mpi_environment.h"
#include "train/cpu_memory.h"
#include "train/signals.h"

namespace {

int run(int argc, char** argv) {
  cram::CommandLine command("cram_train",
                            {{"config", "TOML file with options", true},
                             {"fresh", "start at step 0 although the run folder has checkpoints; the old run is kept"},
                             {"force", "resume although settings changed, or extend a finished run"},
                             {"dry-run", "print the resolved run, its layout and what it needs, and stop"},
                             {"ranks", "with --dry-run: plan for N ranks, whatever is running now", true},
                             {"check-sync", "the same as parallel.check_sync=N", true},
                             {"print-config", "print every option with its value as TOML and stop"},
                             {"verify", "check the shards and the run's checkpoints byte by byte and stop"}},
                            argc, argv);
  cram::Config config;
  cram::OptionTable options;
  cram::add_train_options(options, config);
  if (command.has("help")) {
    std::fputs(command
                   .help("cram_train [--config FILE] [section.key=value ...]",
                         "options (default; TOML sections and keys are the same):\n" + options.help_text())
                   .c_str(),
               stdout);
    return 0;
  }
  if (command.has("version")) {
    std::puts(cram::version_line("cram_train").c_str());
    return 0;
  }
  if (command.has("config")) options.load_toml_file(command.value("config"));
  if (command.has("check-sync")) options.apply_override("parallel.check_sync=" + command.value("check-sync"));
  for (const std::string& assignment : command.arguments()) options.apply_override(assignment);
  CRAM_CHECK(!command.has("ranks") || command.has("dry-run"), cram::ExitCode::kUsage,
             "--ranks only plans: add --dry-run, or start that many ranks with mpirun -n ", command.value("ranks"));
  const std::int64_t planned = command.has("ranks") ? cram::parse_integer(command.value("ranks"), "--ranks") : 0;
  CRAM_CHECK(!command.has("ranks") || (planned >= 1 && planned <= 1'000'000), cram::ExitCode::kUsage, "--ranks ",
             planned, ": expected 1 to 1000000");

  if (command.has("print-config")) {
    std::fputs(options.dump_toml(true).c_str(), stdout);
    CRAM_CHECK(std::fflush(stdout) == 0, cram::ExitCode::kOther, "writing the options to stdout failed");
    return 0;
  }

  const cram::StopSignals signals;  // from here on a signal is answered with exit code 75
  const cram::Launch launch = cram::detect_launch();
  cram::configure_log({.rank = launch.rank, .world_size = launch.world_size});
  const cram::TrainRequest request{command.has("fresh"), command.has("force"), command.has("dry-run"),
                                   command.has("verify"), static_cast<int>(planned)};
  const cram::MpiEnvironment mpi(launch, &argc, &argv);
  // Inside the scope of MPI: a rank that fails must end the job before it would wait for the others in MPI_Finalize.
  return cram::guarded_main(
      "cram_train",
      [&] {
        const std::unique_ptr<cram::Communicator> world =
            launch.world_size > 1 ? cram::make_mpi_communicator() : cram::make_self_communicator();
        CRAM_CHECK(world->size() == launch.world_size, cram::ExitCode::kUsage, launch.launcher, " started ",
                   launch.world_size, " ranks, but MPI sees ", world->size(),
                   ": they do not know each other; with srun use --mpi=pmix, otherwise mpirun of the MPI that this "
                   "program was built with");
        return cram::run_training(config, options, request, launch, *world, signals);
      },
      [&](int exit_code) {
        if (launch.world_size > 1) mpi.abort(exit_code);
      });
}

}  // namespace

int main(int argc, char** argv) {
  cram::install_cpu_memory();
  return cram::guarded_main("cram_train", [&] { return run(argc, argv); });
}
