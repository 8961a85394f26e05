// Memory of CPU tensors: given out again, aligned, and nothing new after the first step of training.
#include "train/cpu_memory.h"

#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include <thread>

#include "support/golden.h"
#include "train/optimizer.h"

namespace cram::test {
namespace {

const bool kInstalled = [] {
  install_cpu_memory();
  return true;
}();

TEST(CpuMemory, GivesBlocksOutAgainAndKeepsThemApart) {
  for (const std::int64_t bytes : {1, 64, 5000, 1 << 20, 3 << 20, 40 << 20}) {
    const void* first = nullptr;
    {
      const at::Tensor a = at::empty({bytes}, at::kByte);
      const at::Tensor b = at::empty({bytes}, at::kByte);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a.data_ptr()) % 64, 0U);
      a.fill_(1);
      b.fill_(2);
      EXPECT_EQ(a.sum().item<std::int64_t>(), bytes) << "two tensors share memory";
      first = b.data_ptr();
    }
    const std::int64_t before = cpu_memory_counts().blocks_from_system;
    const at::Tensor again = at::empty({bytes}, at::kByte), more = at::empty({bytes}, at::kByte);
    EXPECT_EQ(cpu_memory_counts().blocks_from_system, before) << bytes;
    EXPECT_TRUE(again.data_ptr() == first || more.data_ptr() == first);
  }
  EXPECT_EQ(at::empty({0}).numel(), 0);
}

TEST(CpuMemory, MayBeFreedByAnotherThread) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (int i = 1; i < 300; ++i) {
        at::Tensor x = at::full({i * 37}, t, at::kInt);
        std::thread([x = std::move(x), t]() mutable {
          EXPECT_TRUE(x.eq(t).all().item<bool>());
          x.reset();
        }).join();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(CpuMemory, AStepAfterTheFirstTakesNothingFromTheSystem) {
  const at::NoGradGuard no_grad;
  for (const Precision precision : {Precision::kBf16, Precision::kFp32}) {
    Model model(model_of(2, 64, 2, 128, 500, 32), precision);
    Optimizer optimizer("adamw", model.store, {}, self_mesh());
    const at::Tensor ids = at::randint(5, 500, {16, 32}, at::kLong);
    const at::Tensor positions = at::arange(0, 512, 4, at::kLong), labels = at::randint(5, 500, {128}, at::kLong);
    const auto step = [&](std::int64_t number) {
      (void)model.forward_backward(ids, positions, labels);
      (void)optimizer.own_sum_of_squares();
      optimizer.update({number, 1e-3, 1e-3});
    };
    step(1);
    step(2);  // results of the first may have been alive beside those of the second
    const std::int64_t before = cpu_memory_counts().blocks_from_system;
    for (std::int64_t number = 3; number < 8; ++number) step(number);
    EXPECT_EQ(cpu_memory_counts().blocks_from_system, before) << precision_name(precision);
  }
}

}  // namespace
}  // namespace cram::test
