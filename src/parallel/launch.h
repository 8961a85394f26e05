// How this process was started, by mpirun, srun, another launcher or alone, and the processors it may use.
#pragma once

#include <string>

namespace cram {

struct Launch {
  std::string launcher = "none";  ///< "mpirun", "srun", "PMI" or "none"
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;  ///< among the ranks on this machine
  int local_size = 1;  ///< ranks on this machine
};

/// Reads the launcher's environment variables (Open MPI's, Slurm's, then the PMI ones that others set); touches no
/// library.
[[nodiscard]] Launch detect_launch();

/// Processors this process may run on. A single rank under mpirun is bound to one core by mpirun's default; with
/// `widen` that binding is lifted first (only where this rank is alone on its machine).
[[nodiscard]] int available_processors(bool widen);

}  // namespace cram
