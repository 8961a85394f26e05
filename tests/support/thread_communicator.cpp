#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/types.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <tuple>

#include "base/check.h"
#include "support/thread_ranks.h"

namespace cram {
namespace {

// Ranks hand each other tensors, not streams: what this rank's current stream was given to do with a GPU's tensor is
// over when this returns. So another rank may read it, or write over what was read, on a stream of its own.
void finish_stream(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return;
  c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device()).synchronize();
}

// What the ranks of one group share. Every wait ends when the thing waited for has become impossible.
class Hub {
 public:
  explicit Hub(int size)
      : size_(size), gone_(static_cast<std::size_t>(size), false), slots_(static_cast<std::size_t>(size)) {}

  struct Slot {
    at::Tensor tensor;
    int color = 0;
    int key = 0;
    std::shared_ptr<Hub> group;
  };

  /// This rank's own slot may be written before a barrier, every slot read after it.
  Slot& slot(int rank) { return slots_[static_cast<std::size_t>(rank)]; }

  void barrier() {
    std::unique_lock lock(mutex_);
    const std::int64_t mine = generation_;
    if (++arrived_ == size_) {
      arrived_ = 0;
      ++generation_;
      changed_.notify_all();
      return;
    }
    changed_.wait(lock, [&] { return generation_ != mine || any_gone(); });
    CRAM_CHECK(generation_ != mine, ExitCode::kPeerLost, "a rank left the group while others waited for it");
  }

  // A message waits in its queue until the receiver has copied it: the sender stays (rendezvous), so plans that only
  // work with buffering hang here as they would elsewhere.
  struct Parcel {
    at::Tensor tensor;
    bool taken = false;
  };

  std::shared_ptr<Parcel> post(int from, int to, int tag, const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    auto parcel = std::make_shared<Parcel>(Parcel{tensor, false});
    mail_[{from, to, tag}].push_back(parcel);
    changed_.notify_all();
    return parcel;
  }

  bool has_arrived(int from, int to, int tag) {
    const std::lock_guard lock(mutex_);
    return !mail_[{from, to, tag}].empty();
  }

  bool was_taken(const Parcel& parcel) {
    const std::lock_guard lock(mutex_);
    return parcel.taken;
  }

  void take(int from, int to, int tag, const at::Tensor& into) {
    std::shared_ptr<Parcel> parcel;
    {
      std::unique_lock lock(mutex_);
      std::deque<std::shared_ptr<Parcel>>& queue = mail_[{from, to, tag}];
      changed_.wait(lock, [&] { return !queue.empty() || gone_[static_cast<std::size_t>(from)]; });
      CRAM_CHECK(!queue.empty(), ExitCode::kPeerLost, "rank ", from, " left the group before it sent");
      parcel = queue.front();
      queue.pop_front();
    }
    const bool fits = parcel->tensor.numel() == into.numel() && parcel->tensor.scalar_type() == into.scalar_type();
    if (fits) {
      into.view({-1}).copy_(parcel->tensor.view({-1}));
      finish_stream(into);  // before the sender writes over it
    }
    {
      const std::lock_guard lock(mutex_);
      parcel->taken = true;
      changed_.notify_all();
    }
    CRAM_CHECK(fits, ExitCode::kOther, "receive of ", into.numel(), " elements from rank ", from, ", which sent ",
               parcel->tensor.numel(), " of type ", c10::toString(parcel->tensor.scalar_type()));
  }

  void wait_taken(const Parcel& parcel, int to) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return parcel.taken || gone_[static_cast<std::size_t>(to)]; });
    CRAM_CHECK(parcel.taken, ExitCode::kPeerLost, "rank ", to, " left the group before it received");
  }

  // An all-reduce: what the ranks gave, until the last of them has taken it. Nobody waits to give.
  struct Round {
    std::vector<at::Tensor> given;
    int missing = 0;
  };

  /// The `number`th all-reduce of this rank is the `number`th of all.
  std::shared_ptr<Round> give(std::int64_t number, int rank, const at::Tensor& tensor) {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<Round>& round = rounds_[number];
    if (!round) round = std::make_shared<Round>(Round{std::vector<at::Tensor>(slots_.size()), size_});
    round->given[static_cast<std::size_t>(rank)] = tensor;
    const std::shared_ptr<Round> mine = round;
    if (--round->missing == 0) {
      rounds_.erase(number);
      changed_.notify_all();
    }
    return mine;
  }

  bool is_complete(const Round& round) {
    const std::lock_guard lock(mutex_);
    return round.missing == 0;
  }

  void wait_complete(const Round& round) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return round.missing == 0 || any_gone(); });
    CRAM_CHECK(round.missing == 0, ExitCode::kPeerLost, "a rank left the group while others waited for it");
  }

  void leave(int rank) {
    const std::lock_guard lock(mutex_);
    gone_[static_cast<std::size_t>(rank)] = true;
    changed_.notify_all();
  }

 private:
  [[nodiscard]] bool any_gone() const { return std::find(gone_.begin(), gone_.end(), true) != gone_.end(); }
  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::int64_t generation_ = 0;
  int arrived_ = 0;
  std::vector<bool> gone_;
  std::vector<Slot> slots_;
  std::map<std::tuple<int, int, int>, std::deque<std::shared_ptr<Parcel>>> mail_;
  std::map<std::int64_t, std::shared_ptr<Round>> rounds_;
};

// The parts that the ranks gave, added (or compared) in rank order: the result does not depend on who comes first.
at::Tensor reduced(ReduceOp op, const std::vector<at::Tensor>& parts) {
  at::Tensor result = parts.front().clone();
  for (std::size_t r = 1; r < parts.size(); ++r) {
    if (op == ReduceOp::kSum) {
      result.add_(parts[r]);
    } else {
      result.copy_(at::maximum(result, parts[r]));
    }
  }
  return result;
}

class ThreadAllReduce final : public Work::Pending {
 public:
  ThreadAllReduce(std::shared_ptr<Hub> hub, std::shared_ptr<Hub::Round> round, at::Tensor tensor, ReduceOp op)
      : hub_(std::move(hub)), round_(std::move(round)), tensor_(std::move(tensor)), op_(op) {}

  void wait() override {
    hub_->wait_complete(*round_);
    tensor_.copy_(reduced(op_, round_->given));
  }
  bool done() override { return hub_->is_complete(*round_); }

 private:
  std::shared_ptr<Hub> hub_;
  std::shared_ptr<Hub::Round> round_;
  at::Tensor tensor_;
  ReduceOp op_;
};

// Sends lie in the mail at once; a receive is taken when it is waited for.
class ThreadExchange final : public Work::Pending {
 public:
  struct Sent {
    int peer;
    std::shared_ptr<Hub::Parcel> parcel;
  };
  ThreadExchange(std::shared_ptr<Hub> hub, int rank, std::vector<Sent> sends, std::vector<Message> receives)
      : hub_(std::move(hub)), rank_(rank), sends_(std::move(sends)), receives_(std::move(receives)) {}

  void wait() override {
    for (const Message& message : receives_) hub_->take(message.peer, rank_, message.tag, message.tensor);
    for (const Sent& sent : sends_) hub_->wait_taken(*sent.parcel, sent.peer);
  }
  bool done() override {
    for (const Message& message : receives_) {
      if (!hub_->has_arrived(message.peer, rank_, message.tag)) return false;
    }
    for (const Sent& sent : sends_) {
      if (!hub_->was_taken(*sent.parcel)) return false;
    }
    return true;
  }

 private:
  std::shared_ptr<Hub> hub_;
  int rank_;
  std::vector<Sent> sends_;
  std::vector<Message> receives_;
};

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<Hub> hub, int rank, int size, const std::string& name)
      : Communicator(rank, size, name), hub_(std::move(hub)) {}
  ~ThreadCommunicator() override { hub_->leave(rank()); }

 protected:
  void check_tensor(const at::Tensor&) const override {}  // threads share every device

  Work start_all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    const at::Tensor given = tensor.clone();
    finish_stream(given);
    auto round = hub_->give(all_reduces_++, rank(), given);
    return Work(std::make_unique<ThreadAllReduce>(hub_, std::move(round), tensor, op));
  }

  Work start_all_gather(const at::Tensor& out, const at::Tensor& in) override {
    share(in);
    for (int r = 0; r < size(); ++r) {
      const at::Tensor part = out.view({size(), -1}).select(0, r);
      const at::Tensor& theirs = hub_->slot(r).tensor;
      // In place, this rank's part is there already and others are reading it.
      if (part.const_data_ptr() != theirs.const_data_ptr()) part.copy_(theirs.view({-1}));
    }
    finish_stream(out);
    hub_->barrier();
    return Work();
  }

  Work start_reduce_scatter(const at::Tensor& out, const at::Tensor& in, ReduceOp op) override {
    share(in);
    std::vector<at::Tensor> parts;
    for (int r = 0; r < size(); ++r) parts.push_back(hub_->slot(r).tensor.view({size(), -1}).select(0, rank()));
    const at::Tensor part = reduced(op, parts);
    finish_stream(part);
    hub_->barrier();
    out.view({-1}).copy_(part);
    return Work();
  }

  void do_broadcast(const at::Tensor& tensor, int root) override {
    share(tensor);
    const at::Tensor value = hub_->slot(root).tensor.clone();
    finish_stream(value);
    hub_->barrier();
    if (rank() != root) tensor.copy_(value);
  }

  Work start_exchange(const std::vector<Message>& sends, const std::vector<Message>& receives) override {
    std::vector<ThreadExchange::Sent> sent;
    for (const Message& message : sends) {
      finish_stream(message.tensor);
      sent.push_back({message.peer, hub_->post(rank(), message.peer, message.tag, message.tensor)});
    }
    return Work(std::make_unique<ThreadExchange>(hub_, rank(), std::move(sent), receives));
  }

  void do_barrier() override { hub_->barrier(); }

  std::unique_ptr<Communicator> do_split(int color, int key, const std::string& name) override {
    hub_->slot(rank()).color = color;
    hub_->slot(rank()).key = key;
    hub_->barrier();
    std::vector<std::pair<int, int>> members;  // key, rank here
    for (int r = 0; r < size(); ++r) {
      if (hub_->slot(r).color == color) members.emplace_back(hub_->slot(r).key, r);
    }
    std::sort(members.begin(), members.end());
    const int leader = members.front().second;
    const auto group_size = static_cast<int>(members.size());
    if (rank() == leader) hub_->slot(leader).group = std::make_shared<Hub>(group_size);
    hub_->barrier();
    const std::shared_ptr<Hub> group = hub_->slot(leader).group;
    hub_->barrier();
    if (rank() == leader) hub_->slot(leader).group.reset();
    const auto me = std::find(members.begin(), members.end(), std::pair(key, rank()));
    return std::make_unique<ThreadCommunicator>(group, static_cast<int>(me - members.begin()), group_size, name);
  }

 private:
  void share(const at::Tensor& tensor) {
    finish_stream(tensor);
    hub_->slot(rank()).tensor = tensor;
    hub_->barrier();
  }

  std::int64_t all_reduces_ = 0;
  std::shared_ptr<Hub> hub_;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_thread_communicators(int size) {
  const auto hub = std::make_shared<Hub>(size);
  std::vector<std::unique_ptr<Communicator>> ranks;
  for (int r = 0; r < size; ++r) ranks.push_back(std::make_unique<ThreadCommunicator>(hub, r, size, "world"));
  return ranks;
}

}  // namespace cram
