#include "run/signals.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>

#include "base/check.h"

namespace cram {
namespace {

constexpr std::array<int, 4> kSignals = {SIGTERM, SIGINT, SIGUSR1, SIGHUP};

// A signal handler can only reach objects of static storage.
std::atomic<int> g_received{0};
std::array<struct sigaction, kSignals.size()> g_previous;

// One request can arrive twice at almost the same time: a cluster signals the ranks and the launch script, which hands
// it on.
constexpr std::int64_t kSameRequest_ms = 500;
std::atomic<std::int64_t> g_received_ms{0};

std::int64_t now_ms() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1000 + now.tv_nsec / 1'000'000;
}

extern "C" void handle_stop_signal(int number) {
  int none = 0;
  if (g_received.compare_exchange_strong(none, number)) {
    g_received_ms = now_ms();
  } else if (now_ms() - g_received_ms > kSameRequest_ms) {
    ::_exit(static_cast<int>(ExitCode::kPreempted));
  }
}

}  // namespace

StopSignals::StopSignals() {
  g_received = 0;
  struct sigaction action {};
  action.sa_handler = handle_stop_signal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &action, &g_previous[i]);
}

StopSignals::~StopSignals() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &g_previous[i], nullptr);
}

int StopSignals::received() const noexcept { return g_received; }

const std::array<int, 4>& stop_signals() noexcept { return kSignals; }

const char* signal_name(int number) noexcept {
  switch (number) {
    case SIGTERM: return "SIGTERM";
    case SIGINT: return "SIGINT";
    case SIGUSR1: return "SIGUSR1";
    case SIGHUP: return "SIGHUP";
    default: return "signal";
  }
}

}  // namespace cram
