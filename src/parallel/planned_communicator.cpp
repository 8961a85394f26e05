#include "base/check.h"
#include "parallel/communicator.h"

namespace cram {
namespace {

class PlannedCommunicator final : public Communicator {
 public:
  PlannedCommunicator(int rank, int size, const std::string& name) : Communicator(rank, size, name) {}

 protected:
  void check_tensor(const at::Tensor&) const override { refuse(); }
  Work start_all_reduce(const at::Tensor&, ReduceOp) override { refuse(); }
  Work start_all_gather(const at::Tensor&, const at::Tensor&) override { refuse(); }
  Work start_reduce_scatter(const at::Tensor&, const at::Tensor&, ReduceOp) override { refuse(); }
  void do_broadcast(const at::Tensor&, int) override { refuse(); }
  Work start_exchange(const std::vector<Message>&, const std::vector<Message>&) override { refuse(); }
  void do_barrier() override { refuse(); }
  std::unique_ptr<Communicator> do_split(int, int, const std::string&) override { refuse(); }

 private:
  [[noreturn]] void refuse() const {
    fail(ExitCode::kOther, "group ", name(), " is only planned: it has no other ranks to talk to");
  }
};

}  // namespace

std::unique_ptr<Communicator> make_planned_communicator(int rank, int size, const std::string& name) {
  return std::make_unique<PlannedCommunicator>(rank, size, name);
}

}  // namespace cram
