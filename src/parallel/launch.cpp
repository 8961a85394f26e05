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
  Launch launch;
  if (std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr) {
    launch.launcher = "mpirun";
    launch.world_size = number_from("OMPI_COMM_WORLD_SIZE", 1);
    launch.rank = number_from("OMPI_COMM_WORLD_RANK", 0);
    launch.local_size = number_from("OMPI_COMM_WORLD_LOCAL_SIZE", 1);
  }
  return launch;
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
