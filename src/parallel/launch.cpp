#include "parallel/launch.h"

#include <sched.h>
#include <unistd.h>

#include <cstdlib>

#include "base/options.h"

namespace cram {
namespace {

int number_from(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : static_cast<int>(parse_integer(text, name));
}

}  // namespace

Launch detect_launch() {
  struct Names {
    const char *launcher, *size, *rank, *local_rank, *local_size;
  };
  // srun sets its own names inside every allocation, so mpirun's come first; SLURM_NTASKS alone (a batch script's) is
  // no launcher, SLURM_STEP_NUM_TASKS is set for the tasks of a step.
  constexpr Names kLaunchers[] = {
      {"mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
       "OMPI_COMM_WORLD_LOCAL_SIZE"},
      {"srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_TASKS_ON_THIS_NODE"},
      {"PMI", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
  };
  for (const Names& names : kLaunchers) {
    if (std::getenv(names.size) == nullptr || std::getenv(names.rank) == nullptr) continue;
    Launch launch;
    launch.launcher = names.launcher;
    launch.world_size = number_from(names.size, 1);
    launch.rank = number_from(names.rank, 0);
    launch.local_rank = number_from(names.local_rank, 0);
    launch.local_size = number_from(names.local_size, 1);
    return launch;
  }
  return {};
}

int available_processors(bool widen) {
  cpu_set_t set;
  if (widen) {
    CPU_ZERO(&set);
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    for (int cpu = 0; cpu < online && cpu < CPU_SETSIZE; ++cpu) CPU_SET(cpu, &set);
    // The kernel cuts it down to what the container allows; a refusal leaves the binding as it was.
    (void)sched_setaffinity(0, sizeof set, &set);
  }
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return CPU_COUNT(&set);
}

}  // namespace cram
