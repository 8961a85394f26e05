// SIGTERM, SIGINT, SIGUSR1 and SIGHUP (a lost terminal) ask the run to save and stop; a second one, half a second
// later or more, leaves at once with exit code 75.
#pragma once

#include <array>

namespace cram {

/// Installs the handlers for its lifetime and restores the old ones.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  /// The first signal received, or 0.
  [[nodiscard]] int received() const noexcept;
};

/// The four of them.
[[nodiscard]] const std::array<int, 4>& stop_signals() noexcept;

/// "SIGTERM" for the four; "signal 7" otherwise.
[[nodiscard]] const char* signal_name(int number) noexcept;

}  // namespace cram
