// The clock that durations are measured with.
#pragma once

#include <chrono>

namespace cram {

/// Seconds of a steady clock, from an unspecified start.
[[nodiscard]] inline double steady_now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace cram
