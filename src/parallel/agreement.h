// Small things on which all ranks must agree although one of them knows or does it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "parallel/communicator.h"

namespace cram {

/// Rank 0's text on every rank.
[[nodiscard]] std::string broadcast_text(Communicator& group, const std::string& text);

/// Every rank's text, in rank order, on every rank.
[[nodiscard]] std::vector<std::string> gather_text(Communicator& group, const std::string& text);

/// Every rank's text, in rank order, on rank 0; empty elsewhere. What a rank moves does not grow with the group.
[[nodiscard]] std::vector<std::string> gather_text_to_root(Communicator& group, const std::string& text);

/// Runs `action` on rank 0 while the others wait. When it throws cram::Error there, every rank throws an Error with the
/// same exit code, so that none goes on alone.
void on_root(Communicator& group, const std::function<void()>& action);

/// The largest of the ranks' values.
[[nodiscard]] std::int64_t agree_on_largest(Communicator& group, std::int64_t value);

/// The same as an asynchronous question; the answer must be waited for.
class PendingLargest {
 public:
  PendingLargest(Communicator& group, std::int64_t value);
  [[nodiscard]] std::int64_t wait();

 private:
  at::Tensor largest_;
  Work work_;
};

/// Rank 0's value on every rank, to the last bit.
[[nodiscard]] double broadcast_value(Communicator& group, double value);

}  // namespace cram
