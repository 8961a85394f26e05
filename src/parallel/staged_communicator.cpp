// Moves tensors of any device through host memory with a backend that only knows CPU tensors. Slow, but several ranks
// may share one GPU, which NCCL refuses.
#include <torch/types.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "parallel/communicator.h"

namespace cram {
namespace {

// Host memory for tensors under way, kept between operations: pinning pages costs more than most copies. Holds as many
// buffers as were ever in flight at once. One thread, like its communicator.
class HostBuffers {
 public:
  at::Tensor take(std::int64_t bytes) {
    const auto larger = [](const at::Tensor& a, const at::Tensor& b) { return a.numel() < b.numel(); };
    auto best = free_.end();  // the smallest that is large enough
    for (auto i = free_.begin(); i != free_.end(); ++i) {
      if (i->numel() >= bytes && (best == free_.end() || larger(*i, *best))) best = i;
    }
    const bool fits = best != free_.end();
    if (!fits && !free_.empty()) best = std::max_element(free_.begin(), free_.end(), larger);  // outgrown: replaced
    at::Tensor buffer;
    if (best != free_.end()) {
      buffer = std::move(*best);
      free_.erase(best);
    }
    if (fits) return buffer;
    buffer.reset();  // before its successor exists
    return at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(at::hasCUDA()));
  }
  void give_back(at::Tensor buffer) { free_.push_back(std::move(buffer)); }

 private:
  std::vector<at::Tensor> free_;
};

// A buffer for the elements of one tensor, as a flat tensor of its type; goes back when nobody needs it. Move-only.
class HostCopy {
 public:
  HostCopy(std::shared_ptr<HostBuffers> buffers, const at::Tensor& like)
      : buffers_(std::move(buffers)),
        bytes_(buffers_->take(static_cast<std::int64_t>(like.nbytes()))),
        tensor_(bytes_.narrow(0, 0, static_cast<std::int64_t>(like.nbytes())).view(like.scalar_type())) {}
  ~HostCopy() {
    if (buffers_ != nullptr) buffers_->give_back(std::move(bytes_));
  }
  HostCopy(HostCopy&&) noexcept = default;
  HostCopy& operator=(HostCopy&&) = delete;
  HostCopy(const HostCopy&) = delete;
  HostCopy& operator=(const HostCopy&) = delete;

  [[nodiscard]] const at::Tensor& tensor() const { return tensor_; }

 private:
  std::shared_ptr<HostBuffers> buffers_;
  at::Tensor bytes_, tensor_;
};

// The inner operation on host copies; results go back to their tensors in wait(). Copies between device and host wait
// for the device: the inner backend and the next user of a buffer know nothing of streams.
class StagedPending final : public Work::Pending {
 public:
  explicit StagedPending(std::shared_ptr<HostBuffers> buffers) : buffers_(std::move(buffers)) {}

  /// A host copy of a tensor that is sent.
  at::Tensor from(const at::Tensor& tensor) {
    const at::Tensor host = copies_.emplace_back(buffers_, tensor).tensor();
    host.copy_(tensor.view({-1}));
    return host;
  }
  /// Host memory whose content goes to `tensor` when the operation is over.
  at::Tensor into(const at::Tensor& tensor) {
    const at::Tensor host = copies_.emplace_back(buffers_, tensor).tensor();
    results_.emplace_back(tensor, host);
    return host;
  }
  void run(Work inner) { inner_ = std::move(inner); }

  void wait() override {
    inner_.wait();
    for (const auto& [tensor, host] : results_) tensor.view({-1}).copy_(host);
  }
  bool done() override { return inner_.done(); }

 private:
  std::shared_ptr<HostBuffers> buffers_;
  std::vector<HostCopy> copies_;
  std::vector<std::pair<at::Tensor, at::Tensor>> results_;
  Work inner_;  // last, so that it is over before its buffers go back
};

class StagedCommunicator final : public Communicator {
 public:
  explicit StagedCommunicator(std::unique_ptr<Communicator> inner)
      : Communicator(inner->rank(), inner->size(), inner->name()), inner_(std::move(inner)) {
    share_pending(*inner_);
  }

 protected:
  void check_tensor(const at::Tensor&) const override {}  // any device; the inner one refuses types it cannot move

  Work start_all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    auto pending = std::make_unique<StagedPending>(buffers_);
    const at::Tensor host = pending->into(tensor);
    host.copy_(tensor.view({-1}));
    pending->run(inner_->all_reduce_async_(host, op));
    return Work(std::move(pending));
  }

  Work start_all_gather(const at::Tensor& out, const at::Tensor& in) override {
    auto pending = std::make_unique<StagedPending>(buffers_);
    const at::Tensor host = pending->into(out);
    const at::Tensor mine = host.narrow(0, in.numel() * rank(), in.numel());  // in place: one buffer, one copy
    mine.copy_(in.view({-1}));
    pending->run(inner_->all_gather_async(host, mine));
    return Work(std::move(pending));
  }

  Work start_reduce_scatter(const at::Tensor& out, const at::Tensor& in, ReduceOp op) override {
    auto pending = std::make_unique<StagedPending>(buffers_);
    const at::Tensor source = pending->from(in);
    pending->run(inner_->reduce_scatter_async(pending->into(out), source, op));
    return Work(std::move(pending));
  }

  void do_broadcast(const at::Tensor& tensor, int root) override {
    const HostCopy host(buffers_, tensor);
    if (rank() == root) host.tensor().copy_(tensor.view({-1}));
    inner_->broadcast_(host.tensor(), root);
    if (rank() != root) tensor.view({-1}).copy_(host.tensor());
  }

  Work start_exchange(const std::vector<Message>& sends, const std::vector<Message>& receives) override {
    auto pending = std::make_unique<StagedPending>(buffers_);
    std::vector<Message> host_sends = sends, host_receives = receives;
    for (Message& message : host_sends) message.tensor = pending->from(message.tensor);
    for (Message& message : host_receives) message.tensor = pending->into(message.tensor);
    pending->run(inner_->exchange_async_(host_sends, host_receives));
    return Work(std::move(pending));
  }

  void do_barrier() override { inner_->barrier(); }

  std::unique_ptr<Communicator> do_split(int color, int key, const std::string& name) override {
    return make_staged_communicator(inner_->split(color, key, name));
  }

 private:
  std::shared_ptr<HostBuffers> buffers_ = std::make_shared<HostBuffers>();
  std::unique_ptr<Communicator> inner_;
};

}  // namespace

std::unique_ptr<Communicator> make_staged_communicator(std::unique_ptr<Communicator> inner) {
  return std::make_unique<StagedCommunicator>(std::move(inner));
}

}  // namespace cram
