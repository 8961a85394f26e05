#include "parallel/communicator.h"

#include <torch/types.h>

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

Work Communicator::all_reduce_async_(const at::Tensor& tensor, ReduceOp op) {
  check("all_reduce_", tensor);
  trace_.record("all_reduce", tensor.scalar_type(), tensor.numel(), bytes_of(tensor) * 2 * (size_ - 1) / size_);
  if (tensor.numel() == 0 || size_ == 1) return Work();
  return start_all_reduce(tensor, op);
}

Work Communicator::all_gather_async(const at::Tensor& out, const at::Tensor& in) {
  check("all_gather", out);
  check("all_gather", in);
  CRAM_CHECK(out.numel() == size_ * in.numel() && out.scalar_type() == in.scalar_type(), ExitCode::kOther,
             "all_gather on group ", name_, ": expected ", size_, " x ", in.numel(), " elements of one type, got ",
             out.numel());
  trace_.record("all_gather", in.scalar_type(), out.numel(), bytes_of(out) * (size_ - 1) / size_);
  if (in.numel() == 0) return Work();
  return start_all_gather(out, in);
}

Work Communicator::reduce_scatter_async(const at::Tensor& out, const at::Tensor& in, ReduceOp op) {
  check("reduce_scatter", out);
  check("reduce_scatter", in);
  CRAM_CHECK(in.numel() == size_ * out.numel() && out.scalar_type() == in.scalar_type(), ExitCode::kOther,
             "reduce_scatter on group ", name_, ": expected ", size_, " x ", out.numel(), " elements of one type, got ",
             in.numel());
  trace_.record("reduce_scatter", in.scalar_type(), in.numel(), bytes_of(in) * (size_ - 1) / size_);
  if (out.numel() == 0) return Work();
  return start_reduce_scatter(out, in, op);
}

Work Communicator::exchange_async_(const std::vector<Message>& sends, const std::vector<Message>& receives) {
  std::vector<Message> full_sends, full_receives;
  for (const Message& message : sends) {
    check("exchange_", message.tensor);
    check_peer("exchange_", message.peer);
    trace_.record("send", message.tensor.scalar_type(), message.tensor.numel(), bytes_of(message.tensor));
    if (message.tensor.numel() > 0) full_sends.push_back(message);
  }
  for (const Message& message : receives) {
    check("exchange_", message.tensor);
    check_peer("exchange_", message.peer);
    trace_.record("receive", message.tensor.scalar_type(), message.tensor.numel(), 0);
    if (message.tensor.numel() > 0) full_receives.push_back(message);
  }
  if (full_sends.empty() && full_receives.empty()) return Work();
  return start_exchange(full_sends, full_receives);
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
  trace_.record("broadcast", tensor.scalar_type(), tensor.numel(), rank_ == root && size_ > 1 ? bytes_of(tensor) : 0);
  if (tensor.numel() > 0 && size_ > 1) do_broadcast(tensor, root);
}

void Communicator::barrier() {
  trace_.record("barrier", at::kByte, 0, 0);
  if (size_ > 1) do_barrier();
}

std::unique_ptr<Communicator> Communicator::split(int color, int key, const std::string& name) {
  trace_.record("split", at::kByte, 0, 0);
  return do_split(color, key, name);
}

}  // namespace cram
