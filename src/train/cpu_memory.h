// Where tensors on the CPU get their memory: blocks that were used once are kept and given out again, so that a step
// after the first takes nothing from the system, and large ones lie in huge pages, which spares the TLB most of its
// misses.
#pragma once

#include <cstdint>

namespace cram {

/// From now on every CPU tensor of this process uses it. For the start of main(), before any tensor exists.
void install_cpu_memory();

/// Gives the blocks that nobody uses back to the system: for when what comes next has other shapes. (On a GPU see
/// device.h.)
void return_cpu_memory();

struct CpuMemoryCounts {
  std::int64_t blocks_from_system = 0;  ///< so far
  std::int64_t bytes_from_system = 0;
  std::int64_t blocks_given = 0;
  std::int64_t bytes_in_use = 0;       ///< of tensors that are alive now, rounded up to blocks
  std::int64_t peak_bytes_in_use = 0;  ///< the most since the start or `reset_cpu_memory_peak`
};
/// Zeros when it is not installed.
[[nodiscard]] CpuMemoryCounts cpu_memory_counts();
/// What is in use now is the most so far.
void reset_cpu_memory_peak();

}  // namespace cram
