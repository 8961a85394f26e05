// A group of ranks and what they can do together: collectives and messages on tensors.
//
// One abstract class, several backends (this process alone, threads, MPI); the backend is chosen by the caller once and
// nothing else knows it. Public members check their arguments, count bytes and keep the trace; a backend moves data.
//
// Rules for callers: every rank of a group calls the same operations in the same order (the trace shows who did not);
// tensors are contiguous and on the backend's device; a tensor of an asynchronous operation is left alone until its
// `Work` was waited for.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "parallel/pending.h"
#include "parallel/trace.h"

namespace cram {

enum class ReduceOp { kSum, kMax };

/// A pending asynchronous operation. Move-only; must be waited for before it goes.
class [[nodiscard]] Work {
 public:
  /// What a backend keeps until the operation is over.
  class Pending {
   public:
    virtual ~Pending() = default;
    virtual void wait() = 0;
    /// True when wait() would return at once; looking makes progress.
    [[nodiscard]] virtual bool done() = 0;
  };

  Work() = default;
  explicit Work(std::unique_ptr<Pending> pending) : pending_(std::move(pending)) {}
  Work(Work&&) noexcept = default;
  /// Waiting for the one that is replaced first would hide an error; it must be over already.
  Work& operator=(Work&&) noexcept = default;

  /// Returns when the tensors may be used; at once for a default-made or finished one. Rethrows what went wrong.
  void wait();
  /// True when wait() would return at once. Looking makes progress where nothing else does (MPI).
  [[nodiscard]] bool done() { return !pending_ || pending_->done(); }
  /// Who is told while wait() blocks; set by the communicator.
  void announce(std::shared_ptr<PendingOperations> waiting, const Operation& operation) {
    waiting_ = std::move(waiting);
    operation_ = operation;
  }

 private:
  std::unique_ptr<Pending> pending_;
  std::shared_ptr<PendingOperations> waiting_;
  Operation operation_;
};

/// One side of a message in `exchange_`.
struct Message {
  int peer = 0;
  at::Tensor tensor;
  int tag = 0;  ///< a receive takes the first message from its peer with its tag
};

class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return size_; }
  /// Of the group, for messages and traces: "world", "tensor", "data".
  [[nodiscard]] const std::string& name() const { return name_; }

  /// In place; the same bits on every rank.
  void all_reduce_(const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum);
  /// `out` holds size() parts of in.numel() elements, in rank order. `in` may be this rank's part of `out` itself.
  void all_gather(const at::Tensor& out, const at::Tensor& in);
  /// `in` holds size() parts of out.numel() elements; part r, summed over the ranks, goes to rank r.
  void reduce_scatter(const at::Tensor& out, const at::Tensor& in, ReduceOp op = ReduceOp::kSum);
  void broadcast_(const at::Tensor& tensor, int root);
  void send(const at::Tensor& tensor, int peer);
  void recv_(const at::Tensor& tensor, int peer);
  /// All sends and receives at once: no order among them can deadlock. Messages between the same two ranks with the
  /// same tag arrive in the order of the lists.
  void exchange_(const std::vector<Message>& sends, const std::vector<Message>& receives);
  void barrier();

  [[nodiscard]] Work all_reduce_async_(const at::Tensor& tensor, ReduceOp op = ReduceOp::kSum);
  [[nodiscard]] Work all_gather_async(const at::Tensor& out, const at::Tensor& in);
  [[nodiscard]] Work reduce_scatter_async(const at::Tensor& out, const at::Tensor& in, ReduceOp op = ReduceOp::kSum);
  [[nodiscard]] Work exchange_async_(const std::vector<Message>& sends, const std::vector<Message>& receives);

  /// Ranks of the same `color` form a group, ordered by `key`, then by rank here. Collective.
  [[nodiscard]] std::unique_ptr<Communicator> split(int color, int key, const std::string& name);

  /// False where an operation that was started keeps later ones of this group waiting until its peer is there (a GPU's
  /// stream): then sends and receives that belong together must come in one exchange.
  [[nodiscard]] virtual bool sends_in_background() const { return true; }

  [[nodiscard]] CommunicationTrace& trace() { return trace_; }

  /// What this rank waits for; shared by a group and all that were split off it.
  [[nodiscard]] PendingOperations& pending() const { return *pending_; }
  [[nodiscard]] std::shared_ptr<const PendingOperations> shared_pending() const { return pending_; }
  /// From now on this group, and what is split off it, tells `pending` what it waits for.
  void report_to(std::shared_ptr<PendingOperations> pending) { pending_ = std::move(pending); }

  /// Debugging: before every collective the ranks of the group compare what they are about to do, and a difference is
  /// Error(kPeerLost) naming both sides instead of a hang or a wrong sum. Costs a small all-gather each. Groups split
  /// off afterwards inherit it.
  void check_calls(bool on) { checks_calls_ = on; }

 protected:
  Communicator(int rank, int size, std::string name);

  /// For backends that work through another communicator: a wait in either is the same rank's.
  void share_pending(const Communicator& other) { pending_ = other.pending_; }

  // What a backend does; arguments are checked and recorded already. Sizes of 0 elements never arrive here.
  [[nodiscard]] virtual Work start_all_reduce(const at::Tensor& tensor, ReduceOp op) = 0;
  [[nodiscard]] virtual Work start_all_gather(const at::Tensor& out, const at::Tensor& in) = 0;
  [[nodiscard]] virtual Work start_reduce_scatter(const at::Tensor& out, const at::Tensor& in, ReduceOp op) = 0;
  virtual void do_broadcast(const at::Tensor& tensor, int root) = 0;
  [[nodiscard]] virtual Work start_exchange(const std::vector<Message>& sends,
                                            const std::vector<Message>& receives) = 0;
  virtual void do_barrier() = 0;
  [[nodiscard]] virtual std::unique_ptr<Communicator> do_split(int color, int key, const std::string& name) = 0;
  /// Throws Error(kUsage) unless this backend can move the tensor (device, dtype).
  virtual void check_tensor(const at::Tensor& tensor) const = 0;

 private:
  void check(const char* operation, const at::Tensor& tensor) const;
  void check_peer(const char* operation, int peer) const;
  /// Records the operation, compares it with the other ranks' when that is on, and describes it for who waits.
  Operation begin(const char* name, at::ScalarType dtype, std::int64_t count, double bytes, int peer = -1);
  Operation begin_unchecked(const char* name, at::ScalarType dtype, std::int64_t count, double bytes, int peer);
  [[nodiscard]] bool compares(int peer) const { return checks_calls_ && peer < 0 && size_ > 1; }
  class Comparison;
  template <class Start>
  Work started(const Operation& operation, const Start& start);
  int rank_, size_;
  std::string name_;
  CommunicationTrace trace_;
  std::shared_ptr<PendingOperations> pending_ = std::make_shared<PendingOperations>();
  bool checks_calls_ = false;
  std::int64_t collectives_ = 0;
};

/// The group of this process alone: every operation is a copy or nothing.
[[nodiscard]] std::unique_ptr<Communicator> make_self_communicator();

/// A place in a group that does not exist: for planning what a rank would hold. Every operation is refused.
[[nodiscard]] std::unique_ptr<Communicator> make_planned_communicator(int rank, int size, const std::string& name);

/// MPI_COMM_WORLD, for CPU tensors; needs an MpiEnvironment that outlives it. bf16 is reduced by an operation of our
/// own (Open MPI has none); counts beyond an int are cut into pieces.
[[nodiscard]] std::unique_ptr<Communicator> make_mpi_communicator();

/// `inner`, which moves CPU tensors, for tensors of any device: they go through host buffers (pinned where there is a
/// GPU, kept and used again). Starting waits for the device to make its input, wait() for the copy back; in between the
/// operation is as asynchronous as the inner one. For checks: several MPI ranks may share one GPU this way.
[[nodiscard]] std::unique_ptr<Communicator> make_staged_communicator(std::unique_ptr<Communicator> inner);

/// NCCL between the GPUs of the ranks of `control`, one GPU each (NCCL refuses two ranks on one). Collective over
/// `control`, a communicator on CPU tensors, which is only needed until this returns; the groups split off it get the
/// same treatment. Error(kUsage): a build without NCCL, another NCCL than this was built for, not a GPU of this
/// machine, a GPU shared by two ranks.
///
/// - The host never waits, barrier() excepted. An operation begins when what the current stream was given before is
///   over; Work::wait() makes the current stream wait for the operation and returns, so the tensors may be used there
///   at once and elsewhere (host included) after a synchronisation. That is where the host waits for a slow peer:
///   unseen by pending(). done() says whether the GPU is through.
/// - Messages have no tags: those between two ranks are matched in order. A send is over when it was received, and
///   holds up what this group is given after it; a message to this rank itself needs its receive in the same call.
/// - Errors of other ranks come up at the next start, done() or barrier() as Error(kPeerLost), and end the group.
[[nodiscard]] std::unique_ptr<Communicator> make_nccl_communicator(Communicator& control, at::Device device);

}  // namespace cram
