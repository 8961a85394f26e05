#include "parallel/launch.h"

#include <mpi.h>
#include <sched.h>
#include <unistd.h>

#include <cstdlib>

#include "base/check.h"
#include "base/options.h"

namespace cram {
namespace {

int number_from(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : static_cast<int>(parse_integer(text, name));
}

void check_mpi(int status, const char* operation) {
  if (status == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(status, text, &length);
  fail(ExitCode::kPeerLost, operation, " failed: ", std::string(text, static_cast<std::size_t>(length)));
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

MpiEnvironment::MpiEnvironment(const Launch& launch, int* argc, char*** argv) : active_(launch.launcher != "none") {
  if (!active_) return;
  int provided = 0;
  check_mpi(MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided), "MPI_Init_thread");
  // The default handler aborts before a return code could be looked at.
  check_mpi(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  CRAM_CHECK(provided >= MPI_THREAD_FUNNELED, ExitCode::kPeerLost, "MPI offers thread level ", provided,
             ", expected at least MPI_THREAD_FUNNELED");
}

MpiEnvironment::~MpiEnvironment() {
  if (active_) MPI_Finalize();
}

void MpiEnvironment::abort(int exit_code) const noexcept {
  if (active_) MPI_Abort(MPI_COMM_WORLD, exit_code);
}

std::string mpi_version() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  if (MPI_Get_library_version(text, &length) != MPI_SUCCESS) return "unknown";
  const std::string line(text, static_cast<std::size_t>(length));
  return line.substr(0, line.find(','));
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
