// cram_train: pretrains the encoder. Without --config it is the one-day recipe.
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <thread>

#include "apps/program.h"
#include "apps/train_session.h"
#include "base/check.h"
#include "base/log.h"
#include "base/options.h"
#include "parallel/mpi_environment.h"
#include "run/signals.h"
#include "train/cpu_memory.h"

namespace {

// Only several ranks wait for each other.
std::unique_ptr<cram::Watchdog> make_watchdog(const cram::Config& config, const cram::Launch& launch,
                                              const std::shared_ptr<cram::PendingOperations>& pending,
                                              const cram::StopSignals& signals) {
  if (launch.world_size == 1) return nullptr;
  cram::WatchdogSettings settings;
  settings.rank = launch.rank;
  settings.world_size = launch.world_size;
  settings.timeout_s = config.parallel.timeout.seconds();
  settings.quiet_timeout_s = config.parallel.init_timeout.seconds();
  settings.ending = [&signals] { return signals.received() == SIGTERM; };
  return std::make_unique<cram::Watchdog>(pending, std::move(settings));
}

// What is wrong with a configuration every rank finds. Rank 0 says it and ends the job, which reaches the others as a
// SIGTERM; one that is not ended within two seconds speaks, because then it alone knows.
void let_rank_zero_speak_first(const cram::Launch& launch, const cram::StopSignals& signals, int exit_code) {
  if (launch.rank == 0 || exit_code != static_cast<int>(cram::ExitCode::kUsage)) return;
  for (int i = 0; i < 40; ++i) {
    if (signals.received() == SIGTERM) std::_Exit(exit_code);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

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
  const cram::Launch launch = cram::detect_launch();
  if (command.has("help") || command.has("version") || command.has("print-config")) {
    if (launch.rank > 0) return 0;  // once is enough
  }
  if (command.answered("cram_train [--config FILE] [section.key=value ...]",
                       "options (default; TOML sections and keys are the same):\n" + options.help_text())) {
    return 0;
  }
  if (command.has("config")) options.load_toml_file(command.value("config"));
  if (command.has("check-sync")) options.apply_override("parallel.check_sync=" + command.value("check-sync"));
  for (const std::string& assignment : command.arguments()) options.apply_override(assignment);
  CRAM_CHECK(!command.has("ranks") || command.has("dry-run"), cram::ExitCode::kUsage,
             "--ranks only plans: add --dry-run, or start that many ranks with mpirun -n ", command.value("ranks"));
  const std::int64_t planned = command.integer("ranks", 0);
  CRAM_CHECK(!command.has("ranks") || (planned >= 1 && planned <= 1'000'000), cram::ExitCode::kUsage, "--ranks ",
             planned, ": expected 1 to 1000000");

  if (command.has("print-config")) {
    std::fputs(options.dump_toml(true).c_str(), stdout);
    CRAM_CHECK(std::fflush(stdout) == 0, cram::ExitCode::kOther, "writing the options to stdout failed");
    return 0;
  }

  const cram::StopSignals signals;  // from here on a signal is answered with exit code 75
  cram::configure_log({.rank = launch.rank, .world_size = launch.world_size});
  const cram::TrainRequest request{command.has("fresh"), command.has("force"), command.has("dry-run"),
                                   command.has("verify"), static_cast<int>(planned)};
  // From here on ranks wait for each other, MPI_Init included.
  const auto pending = std::make_shared<cram::PendingOperations>();
  const std::unique_ptr<cram::Watchdog> watchdog = make_watchdog(config, launch, pending, signals);
  std::optional<cram::MpiEnvironment> mpi;
  {
    const cram::PendingOperations::Scope starting(*pending, {.name = "MPI_Init"});
    mpi.emplace(launch, &argc, &argv);
  }
  // Inside the scope of MPI: a rank that fails must end the job before it would wait for the others in MPI_Finalize.
  return cram::guarded_main(
      "cram_train",
      [&] {
        const std::unique_ptr<cram::Communicator> world =
            launch.world_size > 1 ? cram::make_mpi_communicator() : cram::make_self_communicator();
        world->report_to(pending);
        CRAM_CHECK(world->size() == launch.world_size, cram::ExitCode::kUsage, launch.launcher, " started ",
                   launch.world_size, " ranks, but MPI sees ", world->size(),
                   ": they do not know each other; with srun use --mpi=pmix, otherwise mpirun of the MPI that this "
                   "program was built with");
        return cram::run_training(config, options, request, launch, *world, signals, watchdog.get());
      },
      {.before_report = [&](int exit_code) { let_rank_zero_speak_first(launch, signals, exit_code); },
       .after_report =
           [&](int exit_code) {
             if (launch.world_size > 1) mpi->abort(exit_code);
           }});
}

}  // namespace

int main(int argc, char** argv) {
  cram::install_cpu_memory();
  return cram::guarded_main("cram_train", [&] { return run(argc, argv); });
}
