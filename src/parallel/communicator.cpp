#include "parallel/communicator.h"

#include <torch/types.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace cram {
namespace {

double bytes_of(const at::Tensor& tensor) { return static_cast<double>(tensor.nbytes()); }

}  // namespace

Communicator::Communicator(int rank, int size, std::string name) : rank_(rank), size_(size), name_(std::move(name)) {}

void Communicator::check(const char* operation, const at::Tensor& tensor) const {
  CRAM_CHECK(tensor.defined() && tensor.is_contiguous(), ExitCode::kOther, operation, " on group ", name_,
             ": expected a contiguous tensor");
  check_tensor(tensor);
}

void Communicator::check_peer(const char* operation, int peer) const {
  CRAM_CHECK(peer >= 0 && peer < size_, ExitCode::kOther, operation, " on group ", name_, ": rank ", peer,
             " is not one of its ", size_);
}

// What the ranks of a group are about to do, gathered and compared.
class Communicator::Comparison {
 public:
  Comparison(Communicator& group, const Operation& operation) : group_(group), operation_(operation) {
    // Messages are between two ranks, so their number may differ: collectives are counted on their own.
    std::int64_t name[2] = {};
    std::memcpy(name, operation.name, std::min(sizeof name - 1, std::strlen(operation.name)));
    mine_ = at::tensor(
        {group.collectives_, name[0], name[1], static_cast<std::int64_t>(operation.dtype), operation.count}, at::kLong);
    all_ = at::empty({group.size_, mine_.numel()}, at::kLong);
    gathering_ = group.start_all_gather(all_, mine_);
  }
  [[nodiscard]] bool done() { return gathering_.done(); }
  void finish() {
    gathering_.wait();
    const auto* mine = mine_.const_data_ptr<std::int64_t>();
    for (int r = 0; r < group_.size_; ++r) {
      if (at::equal(all_[r], mine_)) continue;
      const auto* theirs = all_[r].const_data_ptr<std::int64_t>();
      fail(ExitCode::kPeerLost, "ranks of group ", group_.name_, " have gone apart at collective ", mine[0], ": rank ",
           group_.rank_, " calls ", operation_.text(), ", rank ", r, " calls ",
           reinterpret_cast<const char*>(theirs + 1), " of ", theirs[4], " x ",
           c10::toString(static_cast<at::ScalarType>(theirs[3])), ", its collective ", theirs[0]);
    }
  }
  /// `work` with the comparison before it: an operation that is to go on in the background is not held up by it.
  static Work before(std::unique_ptr<Comparison> comparison, Work work) {
    class Both : public Work::Pending {
     public:
      Both(std::unique_ptr<Comparison> first, Work then) : first_(std::move(first)), then_(std::move(then)) {}
      void wait() override {
        first_->finish();
        then_.wait();
      }
      [[nodiscard]] bool done() override { return first_->done() && then_.done(); }

     private:
      std::unique_ptr<Comparison> first_;
      Work then_;
    };
    return Work(std::make_unique<Both>(std::move(comparison), std::move(work)));
  }

 private:
  Communicator& group_;
  Operation operation_;
  at::Tensor mine_, all_;
  Work gathering_;
};

Operation Communicator::begin(const char* name, at::ScalarType dtype, std::int64_t count, double bytes, int peer) {
  const Operation operation = begin_unchecked(name, dtype, count, bytes, peer);
  if (compares(peer)) {
    const PendingOperations::Scope waiting(*pending_, operation);
    Comparison(*this, operation).finish();
  }
  return operation;
}

Operation Communicator::begin_unchecked(const char* name, at::ScalarType dtype, std::int64_t count, double bytes,
                                        int peer) {
  const Operation operation{name, &name_, rank_, size_, peer, dtype, count, trace_.operations()};
  trace_.record(name, dtype, count, bytes);
  if (peer < 0) ++collectives_;
  return operation;
}

template <class Start>
Work Communicator::started(const Operation& operation, const Start& start) {
  const PendingOperations::Scope waiting(*pending_, operation);  // some backends wait right here
  Work work = start();
  work.announce(pending_, operation);
  return work;
}

void Work::wait() {
  if (!pending_) return;
  const std::unique_ptr<Pending> pending = std::move(pending_);
  if (waiting_ == nullptr) return pending->wait();
  const PendingOperations::Scope waiting(*waiting_, operation_);
  pending->wait();
}

Work Communicator::all_reduce_async_(const at::Tensor& tensor, ReduceOp op) {
  check("all_reduce_", tensor);
  const Operation operation = begin_unchecked("all_reduce", tensor.scalar_type(), tensor.numel(),
                                              bytes_of(tensor) * 2 * (size_ - 1) / size_, -1);
  if (size_ == 1) return Work();
  return started(operation, [&] {
    std::unique_ptr<Comparison> comparison;
    if (compares(-1)) comparison = std::make_unique<Comparison>(*this, operation);
    Work work = tensor.numel() == 0 ? Work() : start_all_reduce(tensor, op);
    return comparison ? Comparison::before(std::move(comparison), std::move(work)) : std::move(work);
  });
}

Work Communicator::all_gather_async(const at::Tensor& out, const at::Tensor& in) {
  check("all_gather", out);
  check("all_gather", in);
  CRAM_CHECK(out.numel() == size_ * in.numel() && out.scalar_type() == in.scalar_type(), ExitCode::kOther,
             "all_gather on group ", name_, ": expected ", size_, " x ", in.numel(), " elements of one type, got ",
             out.numel());
  const Operation operation = begin("all_gather", in.scalar_type(), out.numel(), bytes_of(out) * (size_ - 1) / size_);
  if (in.numel() == 0) return Work();
  return started(operation, [&] { return start_all_gather(out, in); });
}

Work Communicator::reduce_scatter_async(const at::Tensor& out, const at::Tensor& in, ReduceOp op) {
  check("reduce_scatter", out);
  check("reduce_scatter", in);
  CRAM_CHECK(in.numel() == size_ * out.numel() && out.scalar_type() == in.scalar_type(), ExitCode::kOther,
             "reduce_scatter on group ", name_, ": expected ", size_, " x ", out.numel(), " elements of one type, got ",
             in.numel());
  const Operation operation = begin("reduce_scatter", in.scalar_type(), in.numel(), bytes_of(in) * (size_ - 1) / size_);
  if (out.numel() == 0) return Work();
  return started(operation, [&] { return start_reduce_scatter(out, in, op); });
}

Work Communicator::exchange_async_(const std::vector<Message>& sends, const std::vector<Message>& receives) {
  std::vector<Message> full_sends, full_receives;
  Operation last;
  for (const Message& message : sends) {
    check("exchange_", message.tensor);
    check_peer("exchange_", message.peer);
    const at::Tensor& t = message.tensor;
    last = begin("send", t.scalar_type(), t.numel(), message.peer == rank_ ? 0 : bytes_of(t), message.peer);
    if (t.numel() > 0) full_sends.push_back(message);
  }
  for (const Message& message : receives) {
    check("exchange_", message.tensor);
    check_peer("exchange_", message.peer);
    last = begin("receive", message.tensor.scalar_type(), message.tensor.numel(), 0, message.peer);
    if (message.tensor.numel() > 0) full_receives.push_back(message);
  }
  if (full_sends.empty() && full_receives.empty()) return Work();
  return started(last, [&] { return start_exchange(full_sends, full_receives); });
}

void Communicator::all_reduce_(const at::Tensor& tensor, ReduceOp op) { all_reduce_async_(tensor, op).wait(); }
void Communicator::all_gather(const at::Tensor& out, const at::Tensor& in) { all_gather_async(out, in).wait(); }
void Communicator::reduce_scatter(const at::Tensor& out, const at::Tensor& in, ReduceOp op) {
  reduce_scatter_async(out, in, op).wait();
}
void Communicator::exchange_(const std::vector<Message>& sends, const std::vector<Message>& receives) {
  exchange_async_(sends, receives).wait();
}
void Communicator::send(const at::Tensor& tensor, int peer) { exchange_({{peer, tensor}}, {}); }
void Communicator::recv_(const at::Tensor& tensor, int peer) { exchange_({}, {{peer, tensor}}); }

void Communicator::broadcast_(const at::Tensor& tensor, int root) {
  check("broadcast_", tensor);
  check_peer("broadcast_", root);
  const Operation operation =
      begin("broadcast", tensor.scalar_type(), tensor.numel(), rank_ == root && size_ > 1 ? bytes_of(tensor) : 0);
  if (tensor.numel() == 0 || size_ == 1) return;
  const PendingOperations::Scope waiting(*pending_, operation);
  do_broadcast(tensor, root);
}

void Communicator::barrier() {
  const Operation operation = begin("barrier", at::kByte, 0, 0);
  if (size_ == 1) return;
  const PendingOperations::Scope waiting(*pending_, operation);
  do_barrier();
}

std::unique_ptr<Communicator> Communicator::split(int color, int key, const std::string& name) {
  const Operation operation = begin("split", at::kByte, 0, 0);
  const PendingOperations::Scope waiting(*pending_, operation);
  std::unique_ptr<Communicator> part = do_split(color, key, name);
  part->pending_ = pending_;
  part->checks_calls_ = checks_calls_;
  return part;
}

}  // namespace cram
