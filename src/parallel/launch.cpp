#include "parallel/launch.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "base/options.h"

namespace cram {
namespace {

int number_from(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : static_cast<int>(parse_integer(text, name));
}

// srun writes the tasks of all nodes in one list, "4(x2),3": this node's entry of it.
int slurm_tasks_here() {
  const char* list = std::getenv("SLURM_STEP_TASKS_PER_NODE");
  int node = number_from("SLURM_NODEID", 0);
  const std::string text = list == nullptr ? "1" : list;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    const std::string entry = text.substr(begin, end - begin);
    const std::size_t times = entry.find("(x");
    const auto tasks = static_cast<int>(parse_integer(entry.substr(0, times), "SLURM_STEP_TASKS_PER_NODE"));
    const int nodes = times == std::string::npos
                          ? 1
                          : static_cast<int>(parse_integer(entry.substr(times + 2, entry.find(')') - times - 2),
                                                           "SLURM_STEP_TASKS_PER_NODE"));
    if (node < nodes) return tasks;
    node -= nodes;
    begin = end + 1;
  }
  return 1;
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
      {"srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", nullptr},
      {"PMI", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
  };
  for (const Names& names : kLaunchers) {
    if (std::getenv(names.size) == nullptr || std::getenv(names.rank) == nullptr) continue;
    Launch launch;
    launch.launcher = names.launcher;
    launch.world_size = number_from(names.size, 1);
    launch.rank = number_from(names.rank, 0);
    launch.local_rank = number_from(names.local_rank, 0);
    launch.local_size = names.local_size == nullptr ? slurm_tasks_here() : number_from(names.local_size, 1);
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
