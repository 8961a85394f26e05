// Everything that calls MPI: its scope and the communicator on CPU tensors.
#include <mpi.h>
#include <torch/types.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <utility>

#include "base/check.h"
#include "parallel/communicator.h"
#include "parallel/mpi_environment.h"

namespace cram {
namespace {

// MPI counts are ints; longer tensors go in pieces of this many elements.
constexpr std::int64_t kLargestCount = 1 << 30;

void check_mpi(int status, const std::string& operation) {
  if (status == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(status, text, &length);
  fail(ExitCode::kPeerLost, operation, " failed: ", std::string(text, static_cast<std::size_t>(length)));
}

// Two bytes an element, summed as floats and rounded to nearest even: Open MPI 4 has no bf16.
void combine_bf16(void* in, void* in_out, int* count, bool sum) {
  const auto* a = static_cast<const at::BFloat16*>(in);
  auto* b = static_cast<at::BFloat16*>(in_out);
  for (int i = 0; i < *count; ++i) {
    const auto x = static_cast<float>(a[i]);
    const auto y = static_cast<float>(b[i]);
    b[i] = static_cast<at::BFloat16>(sum ? x + y : std::max(x, y));
  }
}
extern "C" void cram_sum_bf16(void* in, void* in_out, int* count, MPI_Datatype*) {
  combine_bf16(in, in_out, count, true);
}
extern "C" void cram_max_bf16(void* in, void* in_out, int* count, MPI_Datatype*) {
  combine_bf16(in, in_out, count, false);
}

// Types and operations of our own; made with the first communicator, freed by MPI_Finalize.
struct Bf16Support {
  MPI_Datatype type = MPI_DATATYPE_NULL;
  MPI_Op sum = MPI_OP_NULL;
  MPI_Op max = MPI_OP_NULL;
  Bf16Support() {
    check_mpi(MPI_Type_contiguous(2, MPI_BYTE, &type), "MPI_Type_contiguous");
    check_mpi(MPI_Type_commit(&type), "MPI_Type_commit");
    check_mpi(MPI_Op_create(cram_sum_bf16, /*commute=*/1, &sum), "MPI_Op_create");
    check_mpi(MPI_Op_create(cram_max_bf16, /*commute=*/1, &max), "MPI_Op_create");
  }
};

const Bf16Support& bf16_support() {
  static const Bf16Support support;
  return support;
}

MPI_Datatype mpi_type(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return MPI_FLOAT;
    case at::kDouble: return MPI_DOUBLE;
    case at::kLong: return MPI_INT64_T;
    case at::kInt: return MPI_INT32_T;
    case at::kByte: return MPI_UINT8_T;
    case at::kBFloat16: return bf16_support().type;
    default: return MPI_DATATYPE_NULL;
  }
}

MPI_Op mpi_op(at::ScalarType type, ReduceOp op) {
  if (type == at::kBFloat16) return op == ReduceOp::kSum ? bf16_support().sum : bf16_support().max;
  return op == ReduceOp::kSum ? MPI_SUM : MPI_MAX;
}

// Requests of one operation, the tensors they use, and what to do when they are over.
class MpiPending final : public Work::Pending {
 public:
  explicit MpiPending(std::string operation) : operation_(std::move(operation)) {}
  ~MpiPending() override {
    if (requests_.empty()) return;
    // Dropped without wait(): MPI still owns the buffers, so they must not go before it is done. While an exception is
    // on its way the other side may never come: the job ends, and the buffers stay for as long as it lives.
    if (std::uncaught_exceptions() > 0) {
      (void)new std::vector<at::Tensor>(std::move(kept_));  // NOLINT
      return;
    }
    MPI_Waitall(static_cast<int>(requests_.size()), requests_.data(), MPI_STATUSES_IGNORE);
  }
  MPI_Request* add() { return &requests_.emplace_back(MPI_REQUEST_NULL); }
  void keep(const at::Tensor& tensor) { kept_.push_back(tensor); }
  void then(std::function<void()> action) { actions_.push_back(std::move(action)); }
  void wait() override {
    const int status = MPI_Waitall(static_cast<int>(requests_.size()), requests_.data(), MPI_STATUSES_IGNORE);
    requests_.clear();
    check_mpi(status, operation_);
    for (const std::function<void()>& action : actions_) action();
  }
  bool done() override {
    int flag = 0;
    // Does not free the requests that are over: wait() still finds their errors.
    for (MPI_Request& request : requests_) {
      check_mpi(MPI_Request_get_status(request, &flag, MPI_STATUS_IGNORE), operation_);
      if (flag == 0) return false;
    }
    return true;
  }

 private:
  std::string operation_;
  std::vector<MPI_Request> requests_;
  std::vector<at::Tensor> kept_;
  std::vector<std::function<void()>> actions_;
};

class MpiCommunicator final : public Communicator {
 public:
  /// Takes over `handle`.
  MpiCommunicator(MPI_Comm handle, int rank, int size, const std::string& name)
      : Communicator(rank, size, name), handle_(handle) {
    check_mpi(MPI_Comm_set_errhandler(handle_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  }
  ~MpiCommunicator() override { MPI_Comm_free(&handle_); }

 protected:
  void check_tensor(const at::Tensor& tensor) const override {
    CRAM_CHECK(tensor.is_cpu(), ExitCode::kUsage, "group ", name(), ": MPI moves CPU tensors, got one on ",
               tensor.device().str());
    CRAM_CHECK(mpi_type(tensor.scalar_type()) != MPI_DATATYPE_NULL, ExitCode::kUsage, "group ", name(),
               ": MPI cannot move elements of type ", c10::toString(tensor.scalar_type()));
  }

  Work start_all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    auto pending = std::make_unique<MpiPending>(label("all_reduce"));
    pending->keep(tensor);
    for_pieces(tensor.numel(), [&](std::int64_t begin, int count) {
      check_mpi(MPI_Iallreduce(MPI_IN_PLACE, address(tensor, begin), count, mpi_type(tensor.scalar_type()),
                               mpi_op(tensor.scalar_type(), op), handle_, pending->add()),
                label("all_reduce"));
    });
    return Work(std::move(pending));
  }

  Work start_all_gather(const at::Tensor& out, const at::Tensor& in) override {
    auto pending = std::make_unique<MpiPending>(label("all_gather"));
    pending->keep(in);
    pending->keep(out);
    for_pieces(in.numel(), [&](std::int64_t begin, int count) {
      const bool whole = count == in.numel();
      const at::Tensor target = whole ? out : at::empty({size() * std::int64_t{count}}, in.options());
      const bool in_place = whole && address(in, 0) == address(out, in.numel() * rank());
      check_mpi(MPI_Iallgather(in_place ? MPI_IN_PLACE : address(in, begin), count, mpi_type(in.scalar_type()),
                               address(target, 0), count, mpi_type(in.scalar_type()), handle_, pending->add()),
                label("all_gather"));
      if (whole) return;
      pending->then([this, out, target, begin, count] {
        out.view({size(), -1}).narrow(1, begin, count).copy_(target.view({size(), count}));
      });
    });
    return Work(std::move(pending));
  }

  Work start_reduce_scatter(const at::Tensor& out, const at::Tensor& in, ReduceOp op) override {
    auto pending = std::make_unique<MpiPending>(label("reduce_scatter"));
    pending->keep(out);
    for_pieces(out.numel(), [&](std::int64_t begin, int count) {
      const at::Tensor source = count == out.numel() ? in : in.view({size(), -1}).narrow(1, begin, count).contiguous();
      pending->keep(source);
      check_mpi(MPI_Ireduce_scatter_block(address(source, 0), address(out, begin), count, mpi_type(in.scalar_type()),
                                          mpi_op(in.scalar_type(), op), handle_, pending->add()),
                label("reduce_scatter"));
    });
    return Work(std::move(pending));
  }

  void do_broadcast(const at::Tensor& tensor, int root) override {
    for_pieces(tensor.numel(), [&](std::int64_t begin, int count) {
      check_mpi(MPI_Bcast(address(tensor, begin), count, mpi_type(tensor.scalar_type()), root, handle_),
                label("broadcast"));
    });
  }

  Work start_exchange(const std::vector<Message>& sends, const std::vector<Message>& receives) override {
    auto pending = std::make_unique<MpiPending>(label("exchange"));
    // Receives first: a message that finds its buffer posted is not copied twice.
    for (const Message& message : receives) {
      pending->keep(message.tensor);
      for_pieces(message.tensor.numel(), [&](std::int64_t begin, int count) {
        check_mpi(MPI_Irecv(address(message.tensor, begin), count, mpi_type(message.tensor.scalar_type()), message.peer,
                            message.tag, handle_, pending->add()),
                  label("receive"));
      });
    }
    for (const Message& message : sends) {
      pending->keep(message.tensor);
      for_pieces(message.tensor.numel(), [&](std::int64_t begin, int count) {
        check_mpi(MPI_Isend(address(message.tensor, begin), count, mpi_type(message.tensor.scalar_type()), message.peer,
                            message.tag, handle_, pending->add()),
                  label("send"));
      });
    }
    return Work(std::move(pending));
  }

  void do_barrier() override { check_mpi(MPI_Barrier(handle_), label("barrier")); }

  std::unique_ptr<Communicator> do_split(int color, int key, const std::string& name) override {
    MPI_Comm part = MPI_COMM_NULL;
    check_mpi(MPI_Comm_split(handle_, color, key, &part), label("split"));
    return wrap(part, name);
  }

 public:
  static std::unique_ptr<Communicator> wrap(MPI_Comm handle, const std::string& name) {
    int rank = 0;
    int size = 1;
    check_mpi(MPI_Comm_rank(handle, &rank), "MPI_Comm_rank");
    check_mpi(MPI_Comm_size(handle, &size), "MPI_Comm_size");
    return std::make_unique<MpiCommunicator>(handle, rank, size, name);
  }

 private:
  [[nodiscard]] std::string label(const char* operation) const { return concat(operation, " on group ", name()); }

  static char* address(const at::Tensor& tensor, std::int64_t element) {
    return static_cast<char*>(tensor.data_ptr()) + element * tensor.element_size();
  }

  template <class Piece>
  static void for_pieces(std::int64_t numel, const Piece& piece) {
    for (std::int64_t begin = 0; begin < numel; begin += kLargestCount) {
      piece(begin, static_cast<int>(std::min(kLargestCount, numel - begin)));
    }
  }

  MPI_Comm handle_;
};

}  // namespace

MpiEnvironment::MpiEnvironment(const Launch& launch, int* argc, char*** argv)
    : active_(launch.launcher == "mpirun" || launch.world_size > 1) {
  if (!active_) return;
  int provided = 0;
  check_mpi(MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided), "MPI_Init_thread");
  // The default handler aborts before a return code could be looked at.
  check_mpi(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  CRAM_CHECK(provided >= MPI_THREAD_FUNNELED, ExitCode::kPeerLost, "MPI offers thread level ", provided,
             ", expected at least MPI_THREAD_FUNNELED");
}

MpiEnvironment::~MpiEnvironment() {
  if (active_) MPI_Finalize();
}

void MpiEnvironment::abort(int exit_code) const noexcept {
  if (active_) MPI_Abort(MPI_COMM_WORLD, exit_code);
}

std::string mpi_version() {
  char text[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  if (MPI_Get_library_version(text, &length) != MPI_SUCCESS) return "unknown";
  const std::string line(text, static_cast<std::size_t>(length));
  return line.substr(0, line.find(','));
}

std::unique_ptr<Communicator> make_mpi_communicator() {
  MPI_Comm world = MPI_COMM_NULL;
  check_mpi(MPI_Comm_dup(MPI_COMM_WORLD, &world), "MPI_Comm_dup");
  return MpiCommunicator::wrap(world, "world");
}

}  // namespace cram
