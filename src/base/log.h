// Logging: one line a message, to stderr (rank 0 only, unless asked) and to a log file that every rank has.
#pragma once

#include <string>

#include "base/check.h"

namespace cram {

enum class LogLevel : int { kDebug = 0, kInfo = 1, kWarning = 2, kError = 3 };

/// Process-wide log settings. The log is the one thing that may be global: it owns no communicator, and a message
/// must be possible from any place, a destructor included.
struct LogSettings {
  int rank = 0;
  int world_size = 1;
  LogLevel terminal_level = LogLevel::kInfo;  ///< rank 0; other ranks write to the terminal from kError on
  bool says = true;                           ///< false keeps `say` off the terminal: output for another program
};

void configure_log(const LogSettings& settings);

/// Appends to this file from now on, one line a message with time, level and rank; "" closes it.
void open_log_file(const std::string& path);

/// Writes one message. Thread-safe, never throws.
void log_message(LogLevel level, const std::string& message) noexcept;

/// A line on stdout, rank 0 only, also written to the log file: what a program says to the person who runs it.
void say_line(const std::string& text) noexcept;

/// Rewrites the last line of the terminal (only where stdout is one; nothing otherwise). An empty text clears it.
void live_line(const std::string& text) noexcept;
[[nodiscard]] bool stdout_is_terminal() noexcept;

template <class... Parts>
void log_debug(const Parts&... parts) {
  log_message(LogLevel::kDebug, concat(parts...));
}
template <class... Parts>
void log_info(const Parts&... parts) {
  log_message(LogLevel::kInfo, concat(parts...));
}
template <class... Parts>
void log_warning(const Parts&... parts) {
  log_message(LogLevel::kWarning, concat(parts...));
}
template <class... Parts>
void log_error(const Parts&... parts) {
  log_message(LogLevel::kError, concat(parts...));
}
/// `say` is for results and progress, `log_*` for diagnostics.
template <class... Parts>
void say(const Parts&... parts) {
  say_line(concat(parts...));
}

}  // namespace cram
