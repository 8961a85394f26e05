// train.micro_batch_size=auto: what the search takes it gives back before the run's own parts are built.
#include "train/micro_batch.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

#include "support/golden.h"
#include "support/temporary_folder.h"
#include "train/cpu_memory.h"
#include "train/run_plan.h"

namespace cram::test {
namespace {

std::int64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::int64_t total = 0, resident = 0;
  statm >> total >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

TEST(MicroBatch, TheSearchGivesItsMemoryBack) {
  install_cpu_memory();
  at::set_num_threads(1);
  const at::NoGradGuard no_grad;
  const TemporaryFolder out;
  ::setenv("XDG_CACHE_HOME", (out / "cache").c_str(), 1);
  Config given;
  given.model = model_of(2, 128, 4, 256, 8192, 128);
  given.train.precision = "fp32";
  given.train.batch_size = given.train.batch_quantum = 128;
  given.train.micro_batch_size = kAutoMicroBatch;
  RunDescription run{resolve_train_config(given, Layout{}), Layout{}, {}, {}};
  run.device.precision = Precision::kFp32;
  run.device.model_name = "test";
  const StopSignals signals;
  const std::int64_t tensors = cpu_memory_counts().bytes_in_use, resident = resident_bytes();
  reset_cpu_memory_peak();
  const std::int64_t rows = choose_micro_batch(run, self_mesh(), signals);
  const std::int64_t taken = cpu_memory_counts().peak_bytes_in_use - tensors;
  const std::int64_t left = resident_bytes() - resident;
  std::printf("%lld rows chosen, %.0f MB taken on the way, %.0f MB more resident afterwards\n",
              static_cast<long long>(rows), static_cast<double>(taken) / 1e6, static_cast<double>(left) / 1e6);
  EXPECT_EQ(128 % rows, 0);
  EXPECT_GT(taken, 200 << 20) << "nothing large was tried: the test shows nothing";
  EXPECT_EQ(cpu_memory_counts().bytes_in_use, tensors);
  EXPECT_LT(left, 64 << 20);  // kernels' own buffers, code read in
  EXPECT_EQ(remembered_micro_batch(run), rows);
}

}  // namespace
}  // namespace cram::test
