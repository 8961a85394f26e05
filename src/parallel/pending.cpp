#include "parallel/pending.h"

#include <algorithm>

#include "base/check.h"

namespace cram {

std::string Operation::text() const {
  return concat(name, peer >= 0 ? concat(" with rank ", peer) : "", " of ", count, " x ", c10::toString(dtype),
                ", number ", sequence, " of group ", group == nullptr ? "?" : *group, " (rank ", group_rank, " of ",
                group_size, ")");
}

PendingOperations::Scope::Scope(PendingOperations& all, const Operation& operation) : all_(all) {
  const std::lock_guard lock(all_.mutex_);
  all_.entries_.push_back({operation, all_.next_serial_++, std::chrono::steady_clock::now()});
}

PendingOperations::Scope::~Scope() {
  const std::lock_guard lock(all_.mutex_);
  all_.entries_.pop_back();
}

void PendingOperations::step_finished(double seconds) {
  constexpr std::size_t kKept = 31;
  const std::lock_guard lock(mutex_);
  if (steps_s_.size() < kKept) {
    steps_s_.push_back(seconds);
  } else {
    steps_s_[next_step_++ % kKept] = seconds;
  }
}

double PendingOperations::median_step_s() const {
  const std::lock_guard lock(mutex_);
  if (steps_s_.empty()) return 0;
  std::vector<double> sorted = steps_s_;
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  return *middle;
}

std::string PendingOperations::context() const {
  const auto phase_name = [&] {
    switch (phase()) {
      case Phase::kStarting: return "starting";
      case Phase::kTraining: return "training";
      case Phase::kEvaluating: return "evaluating";
      case Phase::kSaving: return "saving";
    }
    return "?";
  };
  const std::int64_t micro_batch = micro_batch_.load(std::memory_order_relaxed);
  return concat("step ", step_.load(std::memory_order_relaxed),
                micro_batch >= 0 ? concat(", micro-batch ", micro_batch) : "", ", ", phase_name());
}

PendingOperations::Waiting PendingOperations::now() const {
  const std::lock_guard lock(mutex_);
  if (entries_.empty()) return {};
  const Entry& outermost = entries_.front();
  const std::chrono::duration<double> since = std::chrono::steady_clock::now() - outermost.since;
  return {true, outermost.serial, since.count(), concat(context(), ": ", outermost.operation.text())};
}

}  // namespace cram
