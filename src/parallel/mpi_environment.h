// MPI as a scope of main().
#pragma once

#include <string>

#include "parallel/launch.h"

namespace cram {

/// MPI_Init/MPI_Finalize as a scope, only under mpirun or when another launcher started several ranks. Errors are
/// returned, not fatal, so that they can be reported with rank and operation.
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

}  // namespace cram
