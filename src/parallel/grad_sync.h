// Sums gradients over the ranks that share them, bucket by bucket, while the last backward pass is still running.
//
// Order of reductions of one buffer: over the tensor ranks where each has the gradient of its own rows (sequence
// parallel), over the two stages that hold the tied embedding, and only then over the data ranks, where the owner of a
// part keeps nothing but its part (ZeRO-1). Sums, no averages: the loss is a sum and is divided once.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "parallel/buckets.h"
#include "parallel/communicator.h"
#include "parallel/mesh.h"

namespace cram {

class GradSync {
 public:
  /// Elements [begin, end) of a buffer.
  struct Range {
    std::int64_t begin = 0;
    std::int64_t end = 0;
  };
  struct Buffer {
    at::Tensor grad;   ///< flat
    at::Tensor owned;  ///< receives the owned parts of the sum; `grad` itself where nothing is shared out
    std::vector<Bucket> buckets;
    std::vector<Range> parameters;  ///< the rest is padding
    bool partial = false;           ///< to be summed over the tensor ranks first
    bool tied = false;              ///< to be summed over the stages that hold it first
  };

  /// Groups must outlive it. Without `overlap` everything waits for `finish`; the result has the same bits.
  GradSync(std::vector<Buffer> buffers, const Mesh& mesh, bool overlap);

  /// The gradients of a parameter (a range given as such) of this batch are complete. Starts every bucket that became
  /// complete. Data ranks must report in the same order.
  void ready(std::size_t buffer, const Range& parameter);
  /// Lets operations in flight make progress; for between two layers.
  void poll();
  /// Sums what was not started and waits for all; prepared for the next batch afterwards.
  void finish();

  struct Times {
    double finish_s = 0;  ///< spent in `finish`: communication that nothing hid
    std::int64_t started_early = 0;
    std::int64_t buckets = 0;
  };
  /// Since the last call.
  [[nodiscard]] Times take_times();

 private:
  struct State {
    std::size_t buffer = 0;
    Bucket bucket;
    std::int64_t parameters = 0;  // elements that are no padding
    std::int64_t missing = 0;     // of them, not complete yet
    bool started = false;
    Work work;
  };
  void start(State& state);
  [[nodiscard]] bool waits_for_others(std::size_t buffer) const;
  std::vector<Buffer> buffers_;
  const Mesh& mesh_;
  bool overlap_;
  std::vector<State> states_;  // buffer by buffer, in order
  Times times_;
};

}  // namespace cram
