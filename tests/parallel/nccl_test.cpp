// NCCL: what can be checked without a GPU, and the conformance suite on as many GPUs as there are.
#ifdef CRAM_NCCL
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <nccl.h>
#endif

#include <algorithm>
#include <string_view>

#include "parallel/communicator_suite.h"
#include "support/thread_ranks.h"

namespace cram::test {
namespace {

std::string refusal(at::Device device) {
  const std::unique_ptr<Communicator> control = make_self_communicator();
  try {
    const std::unique_ptr<Communicator> nccl = make_nccl_communicator(*control, device);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kUsage);
    return error.what();
  }
  return "";
}

#ifndef CRAM_NCCL

TEST(NcclFactory, SaysThatTheBuildHasNone) {
  EXPECT_NE(refusal(at::Device(at::kCUDA, 0)).find("CRAM_CUDA"), std::string::npos);
}

#else

TEST(NcclFactory, RefusesCpus) { EXPECT_NE(refusal(at::kCPU).find("got device cpu"), std::string::npos); }

TEST(NcclFactory, RefusesAGpuThatIsNotThere) {
  const c10::DeviceIndex gpus = c10::cuda::device_count();
  const std::string message = refusal(at::Device(at::kCUDA, gpus));
  EXPECT_NE(message.find(concat("has ", int{gpus}, " usable")), std::string::npos) << message;
}

TEST(NcclFactory, TheLoadedLibraryIsTheOneOfTheHeader) {
  int version = 0;
  ASSERT_EQ(ncclGetVersion(&version), ncclSuccess);
  EXPECT_EQ(version, NCCL_VERSION_CODE);
}

class Nccl : public testing::Test {
 protected:
  void SetUp() override {
    gpus_ = std::min(8, static_cast<int>(c10::cuda::device_count()));
    if (gpus_ == 0) GTEST_SKIP() << "no GPU on this machine";
  }
  int gpus_ = 0;
};

void on_gpu_of_rank(Communicator& control, const std::function<void(Communicator&)>& body) {
  const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(control.rank()));
  suite_device = device;
  const std::unique_ptr<Communicator> nccl = make_nccl_communicator(control, device);
  body(*nccl);
}

// Ranks are threads, one GPU each. Tags are what NCCL does not have.
TEST_F(Nccl, PassesTheSuite) {
  for (int size = 1; size <= gpus_; ++size) {
    for (const SuiteRow& row : kSuite) {
      if (std::string_view(row.name) == "TagsAndBackgroundSends") continue;
      const std::vector<std::string> messages =
          run_ranks(size, [&](Communicator& control) { on_gpu_of_rank(control, row.check); });
      for (std::size_t r = 0; r < messages.size(); ++r) EXPECT_EQ(messages[r], "") << row.name << ", rank " << r;
    }
  }
}

TEST_F(Nccl, RefusesTensorsOfOtherDevicesAndTypes) {
  const std::vector<std::string> messages = run_ranks(1, [](Communicator& control) {
    on_gpu_of_rank(control, [](Communicator& c) {
      EXPECT_THROW(c.all_reduce_(at::ones({1})), Error);
      EXPECT_THROW(c.all_reduce_(ones({1}, at::kHalf)), Error);
    });
  });
  EXPECT_EQ(messages[0], "");
}

// What follows on the current stream sees the result, what came before is in it, and memory that the caller dropped
// is not reused too early.
TEST_F(Nccl, IsOrderedWithTheCurrentStream) {
  const std::vector<std::string> messages = run_ranks(1, [](Communicator& control) {
    on_gpu_of_rank(control, [](Communicator& c) {
      const at::Tensor out = empty({1 << 24});
      for (int i = 0; i < 50; ++i) {
        Work work = c.all_gather_async(out, full({1 << 24}, i));
        const at::Tensor other = full({1 << 24}, -1);
        work.wait();
        require_equal(out, full({1 << 24}, i), "gathered");
      }
      Work work = c.all_gather_async(out, full({1 << 24}, 5));
      while (!work.done()) std::this_thread::yield();
      work.wait();
      require_equal(out, full({1 << 24}, 5), "done");
    });
  });
  EXPECT_EQ(messages[0], "");
}

// Threads hand each other tensors of one GPU, whatever stream each of them works on.
TEST_F(Nccl, OneGpuIsSharedByThreadsOnStreamsOfTheirOwn) {
  for (const SuiteRow& row : kSuite) {
    const std::vector<std::string> messages = run_ranks(4, [&](Communicator& c) {
      suite_device = at::Device(at::kCUDA, 0);
      const c10::cuda::CUDAStreamGuard own(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, /*device=*/0));
      row.check(c);
    });
    for (std::size_t r = 0; r < messages.size(); ++r) EXPECT_EQ(messages[r], "") << row.name << ", rank " << r;
  }
}

// Host buffers are pinned here.
TEST_F(Nccl, OneGpuIsSharedThroughTheHostInstead) {
  for (const SuiteRow& row : kSuite) {
    const std::vector<std::string> messages = run_ranks(4, [&](Communicator& c) {
      suite_device = at::Device(at::kCUDA, 0);
      row.check(*make_staged_communicator(c.split(0, c.rank(), c.name())));
    });
    for (std::size_t r = 0; r < messages.size(); ++r) EXPECT_EQ(messages[r], "") << row.name << ", rank " << r;
  }
}

#endif

}  // namespace
}  // namespace cram::test
