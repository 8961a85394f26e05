// Ends a rank that waits too long for another one, and says for what.
//
// One thread a rank looks at the rank's pending operations. It makes no MPI call: a rank that is overdue writes its
// report and leaves with exit code 30, which ends the job; MPI itself never notices a rank that hangs.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "parallel/pending.h"

namespace cram {

struct WatchdogSettings {
  int rank = 0;
  int world_size = 1;
  double timeout_s = 100;        ///< an operation is overdue after this and 5 median steps
  double quiet_timeout_s = 600;  ///< the same while starting, saving, evaluating: one rank may work alone then
  /// True once the job is being ended from outside (a rank died, mpirun stops the others): what this rank waits for is
  /// written once, before it is killed.
  std::function<bool()> ending;
  /// What to do when overdue, after the report was logged; leaves the process with 30 by default.
  std::function<void(const std::string& report)> give_up;
};

/// Removes what an earlier run's roll call left in the folder.
void clear_roll_call(const std::string& folder, int world_size);

class Watchdog {
 public:
  Watchdog(std::shared_ptr<const PendingOperations> pending, WatchdogSettings settings);
  ~Watchdog();
  /// A folder that all ranks see: from now on a rank that is stuck looks there who else is, and who has not said so.
  void call_roll_in(const std::string& folder);
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  void watch();
  /// Seconds that the operation has been pending while this process was running: one that was stopped with its whole
  /// job (a suspended allocation) has not waited.
  [[nodiscard]] double watched_s(const PendingOperations::Waiting& waiting);
  [[nodiscard]] double limit_s() const;
  /// False when an answer came after all.
  [[nodiscard]] bool report_and_leave(const PendingOperations::Waiting& waiting, double waited_s);
  /// Ranks that have not reported being stuck a while after this one did; "" when that cannot be known.
  [[nodiscard]] std::string roll_call(const std::string& report) const;

  std::shared_ptr<const PendingOperations> pending_;
  WatchdogSettings settings_;
  std::string roll_call_folder_;
  mutable std::mutex mutex_;
  std::condition_variable stopping_;
  bool stop_ = false;
  bool said_ending_ = false;
  std::int64_t watched_serial_ = -1;
  double watched_s_ = 0;
  std::chrono::steady_clock::time_point last_look_ = std::chrono::steady_clock::now();
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace cram
