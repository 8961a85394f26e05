// How this process was started: by mpirun (then MPI is initialised for the lifetime of `MpiEnvironment`) or alone.
#pragma once

#include <string>

namespace cram {

struct Launch {
  std::string launcher = "none";  ///< "mpirun" or "none"
  int rank = 0;
  int world_size = 1;
  int local_size = 1;  ///< ranks on this machine
};

/// Reads the launcher's environment variables; touches no library.
[[nodiscard]] Launch detect_launch();

/// MPI_Init/MPI_Finalize as a scope, only when a launcher is there. Errors are returned, not fatal, so that they can be
/// reported with rank and operation.
class MpiEnvironment {
 public:
  MpiEnvironment(const Launch& launch, int* argc, char*** argv);
  ~MpiEnvironment();
  MpiEnvironment(const MpiEnvironment&) = delete;
  MpiEnvironment& operator=(const MpiEnvironment&) = delete;

  /// Ends every rank of the job; for an exception on one of them. Does nothing without a launcher.
  void abort(int exit_code) const noexcept;

 private:
  bool active_;
};

/// Version line of the MPI library in use.
[[nodiscard]] std::string mpi_version();

/// Processors this process may run on. A single rank under mpirun is bound to one core by mpirun's default; with `widen`
/// that binding is lifted first (only where this rank is alone on its machine).
[[nodiscard]] int available_processors(bool widen);

}  // namespace cram
