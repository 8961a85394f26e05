// What a rank waits for, by name: kept by its communicators, read by its watchdog (another thread) and by error
// messages.
#pragma once

#include <c10/core/ScalarType.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace cram {

/// One collective or message. Names are pointers to what outlives the operation: literals and the group's own name.
struct Operation {
  const char* name = "";
  const std::string* group = nullptr;
  int group_rank = 0;
  int group_size = 1;
  int peer = -1;  ///< of a message
  at::ScalarType dtype = at::kByte;
  std::int64_t count = 0;     ///< elements
  std::int64_t sequence = 0;  ///< of the group

  /// "all_reduce of 4194304 x Float, number 17 of group data (rank 1 of 4)".
  [[nodiscard]] std::string text() const;
};

class PendingOperations {
 public:
  /// What the rank is doing, for messages and for how long a wait may take.
  enum class Phase { kStarting, kTraining, kEvaluating, kSaving };

  void set_phase(Phase phase) { phase_.store(phase, std::memory_order_relaxed); }
  [[nodiscard]] Phase phase() const { return phase_.load(std::memory_order_relaxed); }
  void set_step(std::int64_t step) { step_.store(step, std::memory_order_relaxed); }
  /// -1: none in particular.
  void set_micro_batch(std::int64_t micro_batch) { micro_batch_.store(micro_batch, std::memory_order_relaxed); }

  /// Wall seconds of a finished step; what is normal to wait for depends on them.
  void step_finished(double seconds);
  /// Of the last 31 steps; 0 before the first.
  [[nodiscard]] double median_step_s() const;

  /// An operation is pending while its scope lives.
  class Scope {
   public:
    Scope(PendingOperations& all, const Operation& operation);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    PendingOperations& all_;
  };

  struct Waiting {
    bool any = false;
    std::int64_t serial = 0;  ///< of the outermost operation: another number, another wait
    double since_s = 0;       ///< how long it has been pending
    std::string text;         ///< step, micro-batch, phase and operation
  };
  [[nodiscard]] Waiting now() const;
  /// "step 12, micro-batch 3, training".
  [[nodiscard]] std::string context() const;

 private:
  struct Entry {
    Operation operation;
    std::int64_t serial = 0;
    std::chrono::steady_clock::time_point since;
  };
  mutable std::mutex mutex_;
  std::vector<Entry> entries_;  // a stack: waits nest
  std::int64_t next_serial_ = 0;
  std::vector<double> steps_s_;
  std::size_t next_step_ = 0;
  std::atomic<Phase> phase_{Phase::kStarting};
  std::atomic<std::int64_t> step_{0};
  std::atomic<std::int64_t> micro_batch_{-1};
};

/// A phase as a scope; the one before comes back afterwards.
class PhaseScope {
 public:
  PhaseScope(PendingOperations& pending, PendingOperations::Phase phase) : pending_(pending), before_(pending.phase()) {
    pending_.set_phase(phase);
  }
  ~PhaseScope() { pending_.set_phase(before_); }
  PhaseScope(const PhaseScope&) = delete;
  PhaseScope& operator=(const PhaseScope&) = delete;

 private:
  PendingOperations& pending_;
  PendingOperations::Phase before_;
};

}  // namespace cram
