// NCCL: one GPU a rank. Operations go to a stream of the group's own; events order it with the callers' streams, and
// the host does not wait.
#include "base/check.h"
#include "parallel/communicator.h"

#ifdef CRAM_NCCL
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <nccl.h>
#include <torch/types.h>

#include <exception>
#include <optional>
#include <thread>
#include <utility>

namespace cram {
namespace {

void check_nccl(ncclResult_t result, const std::string& operation) {
  if (result == ncclSuccess) return;
  // Misuse is, for one, two ranks on one GPU; all else is a rank, a link or a GPU that failed.
  const bool misuse = result == ncclInvalidArgument || result == ncclInvalidUsage;
  fail(misuse ? ExitCode::kUsage : ExitCode::kPeerLost, operation, " failed: ", ncclGetErrorString(result), " (",
       ncclGetLastError(nullptr), ")");
}

std::optional<ncclDataType_t> nccl_type(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return ncclFloat32;
    case at::kDouble: return ncclFloat64;
    case at::kLong: return ncclInt64;
    case at::kInt: return ncclInt32;
    case at::kByte: return ncclUint8;
    case at::kBFloat16: return ncclBfloat16;
    default: return std::nullopt;
  }
}

ncclRedOp_t nccl_op(ReduceOp op) { return op == ReduceOp::kSum ? ncclSum : ncclMax; }

// Owns an ncclComm_t.
class NcclHandle {
 public:
  /// Collective over `control`.
  NcclHandle(Communicator& control, at::Device device) {
    const c10::cuda::CUDAGuard guard(device);
    ncclUniqueId id = {};
    if (control.rank() == 0) check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId");
    control.broadcast_(at::from_blob(id.internal, {sizeof id.internal}, at::kByte), 0);
    control.barrier();  // a rank that failed on its way is missed here already, not inside NCCL
    const PendingOperations::Scope waiting(
        control.pending(), Operation{"ncclCommInitRank", &control.name(), control.rank(), control.size()});
    check_nccl(ncclCommInitRank(&comm_, control.size(), id, control.rank()),
               concat("ncclCommInitRank of group ", control.name(), " on ", device.str()));
  }
  ~NcclHandle() {
    if (comm_ == nullptr) return;
    // While an error unwinds, the other ranks may be gone, and ncclCommDestroy would wait for what they never do.
    if (std::uncaught_exceptions() > 0) {
      ncclCommAbort(comm_);
    } else {
      ncclCommDestroy(comm_);
    }
  }
  NcclHandle(const NcclHandle&) = delete;
  NcclHandle& operator=(const NcclHandle&) = delete;

  /// The communicator, after a look for errors that came up since the last call; such an error ends it.
  ncclComm_t checked(const std::string& operation) {
    CRAM_CHECK(comm_ != nullptr, ExitCode::kPeerLost, operation, " failed: NCCL was aborted after an earlier error");
    ncclResult_t state = ncclSuccess;
    check_nccl(ncclCommGetAsyncError(comm_, &state), operation);
    if (state == ncclSuccess || state == ncclInProgress) return comm_;
    ncclCommAbort(std::exchange(comm_, nullptr));
    fail(ExitCode::kPeerLost, operation, " failed: ", ncclGetErrorString(state), " (", ncclGetLastError(nullptr), ")");
  }

 private:
  ncclComm_t comm_ = nullptr;
};

class NcclPending final : public Work::Pending {
 public:
  NcclPending(NcclHandle& handle, const c10::cuda::CUDAStream& stream, std::string operation)
      : handle_(handle), device_(stream.device_index()), operation_(std::move(operation)) {
    over_.record(stream);
  }
  void wait() override { over_.block(c10::cuda::getCurrentCUDAStream(device_)); }
  bool done() override {
    handle_.checked(operation_);
    return over_.query();
  }

 private:
  NcclHandle& handle_;
  c10::DeviceIndex device_;
  std::string operation_;
  at::cuda::CUDAEvent over_;
};

class NcclCommunicator final : public Communicator {
 public:
  /// `control` is this group's own: nobody else uses it.
  NcclCommunicator(std::unique_ptr<Communicator> control, at::Device device)
      : Communicator(control->rank(), control->size(), control->name()),
        control_(std::move(control)),
        device_(device),
        stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index())),
        token_(at::zeros({1}, at::TensorOptions(at::kFloat).device(device))),
        handle_(*control_, device) {
    share_pending(*control_);
  }

  [[nodiscard]] bool sends_in_background() const override { return false; }

 protected:
  void check_tensor(const at::Tensor& tensor) const override {
    CRAM_CHECK(tensor.device() == device_, ExitCode::kUsage, "group ", name(), ": NCCL moves tensors on ",
               device_.str(), " here, got one on ", tensor.device().str());
    CRAM_CHECK(nccl_type(tensor.scalar_type()).has_value(), ExitCode::kUsage, "group ", name(),
               ": NCCL cannot move elements of type ", c10::toString(tensor.scalar_type()));
  }

  Work start_all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    return launch("all_reduce", {tensor}, [&](ncclComm_t comm) {
      return ncclAllReduce(tensor.data_ptr(), tensor.data_ptr(), count(tensor), type(tensor), nccl_op(op), comm,
                           stream_);
    });
  }

  Work start_all_gather(const at::Tensor& out, const at::Tensor& in) override {
    if (in.is_cpu()) {  // the comparison of calls, which is made on the host
      const at::Tensor gathered = at::empty_like(out, at::TensorOptions(device_));
      start_all_gather(gathered, in.to(device_)).wait();
      out.copy_(gathered);
      return Work();
    }
    return launch("all_gather", {out, in}, [&](ncclComm_t comm) {
      return ncclAllGather(in.data_ptr(), out.data_ptr(), count(in), type(in), comm, stream_);
    });
  }

  Work start_reduce_scatter(const at::Tensor& out, const at::Tensor& in, ReduceOp op) override {
    return launch("reduce_scatter", {out, in}, [&](ncclComm_t comm) {
      return ncclReduceScatter(in.data_ptr(), out.data_ptr(), count(out), type(in), nccl_op(op), comm, stream_);
    });
  }

  void do_broadcast(const at::Tensor& tensor, int root) override {
    launch("broadcast", {tensor}, [&](ncclComm_t comm) {
      return ncclBroadcast(tensor.data_ptr(), tensor.data_ptr(), count(tensor), type(tensor), root, comm, stream_);
    }).wait();
  }

  Work start_exchange(const std::vector<Message>& sends, const std::vector<Message>& receives) override {
    std::vector<at::Tensor> tensors;
    tensors.reserve(sends.size() + receives.size());
    for (const Message& message : sends) tensors.push_back(message.tensor);
    for (const Message& message : receives) tensors.push_back(message.tensor);
    return launch("exchange", tensors, [&](ncclComm_t comm) {
      ncclResult_t result = ncclGroupStart();
      if (result != ncclSuccess) return result;
      for (const auto& [peer, tensor, tag] : sends) {
        if (result == ncclSuccess) {
          result = ncclSend(tensor.data_ptr(), count(tensor), type(tensor), peer, comm, stream_);
        }
      }
      for (const auto& [peer, tensor, tag] : receives) {
        if (result == ncclSuccess) {
          result = ncclRecv(tensor.data_ptr(), count(tensor), type(tensor), peer, comm, stream_);
        }
      }
      const ncclResult_t end = ncclGroupEnd();  // a group that was opened is closed, whatever happened in it
      return result == ncclSuccess ? end : result;
    });
  }

  // Alone among the operations the host waits here, and sees it when a peer is lost meanwhile.
  void do_barrier() override {
    Work work = start_all_reduce(token_, ReduceOp::kMax);
    while (!work.done()) std::this_thread::yield();
    work.wait();
  }

  std::unique_ptr<Communicator> do_split(int color, int key, const std::string& group_name) override {
    return std::make_unique<NcclCommunicator>(control_->split(color, key, group_name), device_);
  }

 private:
  static std::size_t count(const at::Tensor& tensor) { return static_cast<std::size_t>(tensor.numel()); }
  static ncclDataType_t type(const at::Tensor& tensor) { return nccl_type(tensor.scalar_type()).value(); }

  // Enqueues `call` behind what the current stream has been given so far.
  template <class Call>
  Work launch(const char* name_of_call, const std::vector<at::Tensor>& tensors, const Call& call) {
    std::string operation = concat(name_of_call, " on group ", name());
    ncclComm_t comm = handle_.checked(operation);
    const c10::cuda::CUDAGuard guard(device_);
    ready_.record(c10::cuda::getCurrentCUDAStream(device_.index()));
    ready_.block(stream_);
    check_nccl(call(comm), operation);
    // The allocator hands memory that is freed too early to nobody before this stream is through with it.
    for (const at::Tensor& tensor : tensors) tensor.record_stream(stream_);
    return Work(std::make_unique<NcclPending>(handle_, stream_, std::move(operation)));
  }

  std::unique_ptr<Communicator> control_;
  at::Device device_;
  c10::cuda::CUDAStream stream_;
  at::cuda::CUDAEvent ready_;  // recorded anew for each operation: a stream waits for what it was when it was told to
  at::Tensor token_;           // [1] of barriers
  NcclHandle handle_;
};

}  // namespace

std::unique_ptr<Communicator> make_nccl_communicator(Communicator& control, at::Device device) {
  CRAM_CHECK(device.is_cuda(), ExitCode::kUsage, "NCCL moves tensors between GPUs, got device ", device.str(),
             ": choose the backend mpi for CPUs");
  int version = 0;
  check_nccl(ncclGetVersion(&version), "ncclGetVersion");
  CRAM_CHECK(version == NCCL_VERSION_CODE, ExitCode::kUsage, "NCCL ", version,
             " was loaded, this program was built for ", NCCL_VERSION_CODE,
             ": keep other libnccl.so.2 off LD_LIBRARY_PATH, or build again");
  const c10::DeviceIndex gpus = c10::cuda::device_count();
  CRAM_CHECK(gpus > 0 && device.index() < gpus, ExitCode::kUsage, "NCCL on ", device.str(), ": this machine has ",
             int{gpus}, " usable GPUs");
  const at::Device full(at::kCUDA, device.has_index() ? device.index() : c10::cuda::current_device());
  return std::make_unique<NcclCommunicator>(control.split(0, control.rank(), control.name()), full);
}

}  // namespace cram

#else

namespace cram {

std::unique_ptr<Communicator> make_nccl_communicator(Communicator&, at::Device) {
  fail(ExitCode::kUsage,
       "this program was built without NCCL: configure with -DCRAM_CUDA=ON and the CUDA torch wheel, ",
       "or choose the backend mpi");
}

}  // namespace cram

#endif
