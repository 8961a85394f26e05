#include "parallel/grad_sync.h"

#include <torch/types.h>

#include <algorithm>

#include "base/check.h"
#include "base/clock.h"

namespace cram {
namespace {

std::int64_t common(const GradSync::Range& range, const Bucket& bucket) {
  return std::max<std::int64_t>(0, std::min(range.end, bucket.end) - std::max(range.begin, bucket.begin));
}

// Buckets one after the other through one group, several in flight.
void all_reduce_buckets(Communicator& group, const GradSync::Buffer& buffer) {
  if (group.size() == 1) return;
  std::vector<Work> pending;
  for (const Bucket& bucket : buffer.buckets) {
    pending.push_back(group.all_reduce_async_(buffer.grad.narrow(0, bucket.begin, bucket.numel())));
  }
  for (Work& work : pending) work.wait();
}

}  // namespace

GradSync::GradSync(std::vector<Buffer> buffers, const Mesh& mesh, bool overlap)
    : buffers_(std::move(buffers)), mesh_(mesh), overlap_(overlap) {
  for (std::size_t b = 0; b < buffers_.size(); ++b) {
    for (const Bucket& bucket : buffers_[b].buckets) {
      State state;
      state.buffer = b;
      state.bucket = bucket;
      for (const Range& parameter : buffers_[b].parameters) state.parameters += common(parameter, bucket);
      state.missing = state.parameters;
      states_.push_back(std::move(state));
    }
  }
}

bool GradSync::waits_for_others(std::size_t buffer) const {
  const Buffer& b = buffers_[buffer];
  return (b.partial && mesh_.tensor().size() > 1) || (b.tied && mesh_.tied().size() > 1);
}

void GradSync::start(State& state) {
  state.started = true;
  const Buffer& buffer = buffers_[state.buffer];
  const at::Tensor grad = buffer.grad.narrow(0, state.bucket.begin, state.bucket.numel());
  if (buffer.owned.is_same(buffer.grad)) {
    state.work = mesh_.data().all_reduce_async_(grad);
  } else {
    state.work = mesh_.data().reduce_scatter_async(buffer.owned.narrow(0, state.bucket.at, state.bucket.owned()), grad);
  }
}

void GradSync::ready(std::size_t buffer, const Range& parameter) {
  for (State& state : states_) {
    if (state.buffer != buffer) continue;
    const std::int64_t elements = common(parameter, state.bucket);
    if (elements == 0) continue;
    state.missing -= elements;
    CRAM_DCHECK(state.missing >= 0);
    if (overlap_ && state.missing == 0 && !waits_for_others(buffer)) {
      start(state);
      ++times_.started_early;
    }
  }
}

void GradSync::poll() {
  if (!overlap_) return;
  for (State& state : states_) {
    // One is enough: looking at any request lets MPI move them all.
    if (state.started && !state.work.done()) return;
  }
}

void GradSync::finish() {
  const double from_s = steady_now_s();
  for (std::size_t b = 0; b < buffers_.size(); ++b) {
    if (buffers_[b].partial) all_reduce_buckets(mesh_.tensor(), buffers_[b]);
    if (buffers_[b].tied) all_reduce_buckets(mesh_.tied(), buffers_[b]);
  }
  for (State& state : states_) {
    if (!state.started) start(state);
  }
  for (State& state : states_) {
    state.work.wait();
    state.started = false;
    state.missing = state.parameters;
  }
  times_.buckets += static_cast<std::int64_t>(states_.size());
  times_.finish_s += steady_now_s() - from_s;
}

GradSync::Times GradSync::take_times() { return std::exchange(times_, {}); }

}  // namespace cram
