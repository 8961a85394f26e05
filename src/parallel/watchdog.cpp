#include "parallel/watchdog.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/check.h"
#include "base/log.h"

namespace cram {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;

constexpr auto kLook = milliseconds(50);
constexpr double kEndingWait_s = 0.2;           // shorter waits are ordinary
constexpr auto kRollCall = milliseconds(1500);  // other ranks got stuck at almost the same time
constexpr double kMedianSteps = 5;
constexpr double kLongestLook_s = 0.5;  // between two looks of a process that is running

std::string roll_call_name(int rank) { return concat("stuck-rank-", rank); }

}  // namespace

Watchdog::Watchdog(std::shared_ptr<const PendingOperations> pending, WatchdogSettings settings)
    : pending_(std::move(pending)), settings_(std::move(settings)), thread_([this] { watch(); }) {}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stopping_.notify_all();
  thread_.join();
}

void Watchdog::call_roll_in(const std::string& folder) {
  const std::lock_guard lock(mutex_);
  roll_call_folder_ = folder;
}

double Watchdog::limit_s() const {
  const double steps_s = kMedianSteps * pending_->median_step_s();
  if (pending_->phase() == PendingOperations::Phase::kTraining) return std::max(settings_.timeout_s, steps_s);
  return std::max({settings_.timeout_s, settings_.quiet_timeout_s, steps_s});
}

double Watchdog::watched_s(const PendingOperations::Waiting& waiting) {
  const auto now = std::chrono::steady_clock::now();
  const double passed_s = std::chrono::duration<double>(now - last_look_).count();
  last_look_ = now;
  if (!waiting.any || waiting.serial != watched_serial_) {
    watched_serial_ = waiting.any ? waiting.serial : -1;
    watched_s_ = 0;
  } else {
    watched_s_ += std::min(passed_s, kLongestLook_s);
  }
  return watched_s_;
}

void Watchdog::watch() {
  std::unique_lock lock(mutex_);
  while (!stopping_.wait_for(lock, kLook, [&] { return stop_; })) {
    const PendingOperations::Waiting waiting = pending_->now();
    const double waited_s = watched_s(waiting);
    if (!waiting.any) continue;
    if (waited_s > limit_s()) {
      lock.unlock();  // whoever destroys this waits for the end of the report
      const bool left = report_and_leave(waiting, waited_s);
      lock.lock();
      if (left) return;
    }
    if (!said_ending_ && waiting.since_s > kEndingWait_s && settings_.ending && settings_.ending()) {
      said_ending_ = true;
      log_error("the job is being ended while this rank waits: ", waiting.text);
    }
  }
}

bool Watchdog::report_and_leave(const PendingOperations::Waiting& waiting, double waited_s) {
  std::string report = concat("no answer for ", static_cast<std::int64_t>(waited_s), " s: ", waiting.text);
  log_error(report);
  const std::string missing = roll_call(report);
  const PendingOperations::Waiting now = pending_->now();
  if (!now.any || now.serial != waiting.serial) {
    log_error("an answer came after all, going on");
    return false;
  }
  if (!missing.empty()) report += "; " + missing;
  if (settings_.give_up) {
    settings_.give_up(report);
    return true;
  }
  std::_Exit(static_cast<int>(ExitCode::kPeerLost));
}

std::string Watchdog::roll_call(const std::string& report) const {
  fs::path folder;
  {
    const std::lock_guard lock(mutex_);
    folder = roll_call_folder_;
  }
  if (folder.empty()) {
    std::this_thread::sleep_for(kRollCall);
    return "";
  }
  const fs::path mine = folder / roll_call_name(settings_.rank);
  std::ofstream(mine) << report << "\n";
  std::this_thread::sleep_for(kRollCall);
  std::string missing;
  std::error_code error;
  for (int rank = 0; rank < settings_.world_size; ++rank) {
    if (!fs::exists(folder / roll_call_name(rank), error)) missing += concat(missing.empty() ? "" : ", ", rank);
  }
  const std::string result =
      missing.empty() ? "" : concat("every rank but ", missing, " has reported being stuck: look there");
  if (!result.empty()) log_error(result);
  return result;  // the file stays for the others to see; the next start removes it
}

void clear_roll_call(const std::string& folder, int world_size) {
  std::error_code error;
  for (int rank = 0; rank < world_size; ++rank) fs::remove(fs::path(folder) / roll_call_name(rank), error);
}

}  // namespace cram
