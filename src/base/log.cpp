#include "base/log.h"

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <mutex>

namespace cram {
namespace {

struct FileCloser {
  void operator()(std::FILE* file) const noexcept { std::fclose(file); }
};

struct LogState {
  std::mutex mutex;
  LogSettings settings;
  std::unique_ptr<std::FILE, FileCloser> file;
  bool live_line_shown = false;
};

// Never destroyed: a destructor elsewhere may still want to log during exit.
LogState& state() {
  static LogState* const instance = new LogState;
  return *instance;
}

const char* level_name(LogLevel level) noexcept {
  switch (level) {
    case LogLevel::kDebug: return "debug";
    case LogLevel::kInfo: return "info";
    case LogLevel::kWarning: return "warning";
    case LogLevel::kError: return "error";
  }
  return "?";
}

void clear_live_line(LogState& s) noexcept {
  if (!s.live_line_shown) return;
  std::fputs("\r\033[K", stdout);
  std::fflush(stdout);
  s.live_line_shown = false;
}

void write_to_file(LogState& s, const char* level, const std::string& message) noexcept {
  if (!s.file) return;
  const auto now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm parts{};
  gmtime_r(&now, &parts);
  char stamp[32];
  std::strftime(stamp, sizeof stamp, "%Y-%m-%dT%H:%M:%SZ", &parts);
  std::fprintf(s.file.get(), "%s %s rank %d: %s\n", stamp, level, s.settings.rank, message.c_str());
  std::fflush(s.file.get());
}

}  // namespace

void configure_log(const LogSettings& settings) {
  LogState& s = state();
  const std::lock_guard lock(s.mutex);
  s.settings = settings;
}

void open_log_file(const std::string& path) {
  LogState& s = state();
  const std::lock_guard lock(s.mutex);
  s.file.reset();
  if (path.empty()) return;
  s.file.reset(std::fopen(path.c_str(), "a"));
  CRAM_CHECK(s.file, ExitCode::kOther, "cannot open the log file ", path, " for appending");
}

void log_message(LogLevel level, const std::string& message) noexcept {
  LogState& s = state();
  const std::lock_guard lock(s.mutex);
  const LogLevel threshold = s.settings.rank == 0 ? s.settings.terminal_level : LogLevel::kError;
  if (level >= threshold) {
    clear_live_line(s);
    if (s.settings.world_size > 1) {
      std::fprintf(stderr, "%s (rank %d): %s\n", level_name(level), s.settings.rank, message.c_str());
    } else {
      std::fprintf(stderr, "%s: %s\n", level_name(level), message.c_str());
    }
  }
  write_to_file(s, level_name(level), message);
}

void say_line(const std::string& text) noexcept {
  LogState& s = state();
  const std::lock_guard lock(s.mutex);
  if (s.settings.rank == 0 && s.settings.says) {
    clear_live_line(s);
    std::fputs(text.c_str(), stdout);
    std::fputc('\n', stdout);
    std::fflush(stdout);
  }
  write_to_file(s, "say", text);
}

bool stdout_is_terminal() noexcept {
  static const bool terminal = [] {
    if (isatty(STDOUT_FILENO) != 1) return false;
    // mpirun gives its ranks a pseudo-terminal whatever its own output is; what counts is where mpirun writes to.
    if (std::getenv("OMPI_COMM_WORLD_SIZE") == nullptr) return true;
    char target[64];
    const std::string link = "/proc/" + std::to_string(getppid()) + "/fd/1";
    const ssize_t length = readlink(link.c_str(), target, sizeof target);
    return length > 0 && std::string(target, static_cast<std::size_t>(length)).rfind("/dev/", 0) == 0 &&
           std::string(target, static_cast<std::size_t>(length)) != "/dev/null";
  }();
  return terminal;
}

void live_line(const std::string& text) noexcept {
  if (!stdout_is_terminal()) return;
  LogState& s = state();
  const std::lock_guard lock(s.mutex);
  if (s.settings.rank != 0) return;
  clear_live_line(s);
  if (text.empty()) return;
  std::size_t columns = 120;
  if (const char* from_environment = std::getenv("COLUMNS")) {
    const long parsed = std::strtol(from_environment, nullptr, 10);
    if (parsed > 10) columns = static_cast<std::size_t>(parsed);
  }
  std::fputs(text.substr(0, columns - 1).c_str(), stdout);
  std::fflush(stdout);
  s.live_line_shown = true;
}

}  // namespace cram
