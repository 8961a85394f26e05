#include "train/cpu_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <vector>

namespace cram {
namespace {

constexpr std::size_t kHeader = 64;  // before every block; keeps the data on a cache line of its own
constexpr std::size_t kHugePage = 2UL << 20;
constexpr std::size_t kSmallest = 4096;  // smaller ones cost malloc nothing

struct Header {
  std::size_t size_class = 0;  // bytes with the header
};

// Eighths of the power of two below: at most an eighth is wasted, and shapes that recur meet the same class.
std::size_t size_class_of(std::size_t bytes) {
  const std::size_t needed = std::max(bytes + kHeader, kSmallest);
  const std::size_t unit = std::max<std::size_t>(kHeader, std::bit_floor(needed) / 8);
  const std::size_t rounded = (needed + unit - 1) / unit * unit;
  return rounded < kHugePage ? rounded : (rounded + kHugePage - 1) / kHugePage * kHugePage;
}

class CpuMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, c10::Device(c10::kCPU)};
    void* data = take(size_class_of(bytes));
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

  void return_free_blocks() {
    const std::lock_guard lock(mutex_);
    for (auto& [size_class, blocks] : free_) {
      for (void* data : blocks) {
        void* block = static_cast<char*>(data) - kHeader;
        if (size_class < kHugePage) {
          c10::free_cpu(block);
        } else {
          munmap(block, size_class);
        }
      }
      blocks.clear();
    }
  }

  CpuMemoryCounts counts() {
    const std::lock_guard lock(mutex_);
    return counts_;
  }

  void reset_peak() {
    const std::lock_guard lock(mutex_);
    counts_.peak_bytes_in_use = counts_.bytes_in_use;
  }

 private:
  static void release(void* data);

  void* take(std::size_t size_class) {
    {
      const std::lock_guard lock(mutex_);
      ++counts_.blocks_given;
      counts_.bytes_in_use += static_cast<std::int64_t>(size_class);
      counts_.peak_bytes_in_use = std::max(counts_.peak_bytes_in_use, counts_.bytes_in_use);
      std::vector<void*>& free = free_[size_class];
      if (!free.empty()) {
        void* data = free.back();
        free.pop_back();
        return data;
      }
      ++counts_.blocks_from_system;
      counts_.bytes_from_system += static_cast<std::int64_t>(size_class);
    }
    void* block = size_class < kHugePage ? c10::alloc_cpu(size_class) : from_system(size_class);
    new (block) Header{size_class};
    return static_cast<char*>(block) + kHeader;
  }

  // Aligned to a huge page: more is mapped and the ends are given back.
  static void* from_system(std::size_t bytes) {
    char* mapped = static_cast<char*>(
        mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    const std::size_t before = (kHugePage - reinterpret_cast<std::uintptr_t>(mapped) % kHugePage) % kHugePage;
    if (before > 0) munmap(mapped, before);
    if (before < kHugePage) munmap(mapped + before + bytes, kHugePage - before);
    (void)madvise(mapped + before, bytes, MADV_HUGEPAGE);  // advice: without it small pages do
    return mapped + before;
  }

  void give_back(void* data) {
    const std::size_t size_class = reinterpret_cast<Header*>(static_cast<char*>(data) - kHeader)->size_class;
    const std::lock_guard lock(mutex_);
    counts_.bytes_in_use -= static_cast<std::int64_t>(size_class);
    free_[size_class].push_back(data);
  }

  std::mutex mutex_;
  std::map<std::size_t, std::vector<void*>> free_;
  CpuMemoryCounts counts_;
};

// Tensors may outlive main(), so this is never destroyed.
CpuMemory* g_installed = nullptr;

void CpuMemory::release(void* data) {
  if (data != nullptr) g_installed->give_back(data);
}

}  // namespace

void install_cpu_memory() {
  if (g_installed != nullptr) return;
  g_installed = new CpuMemory;
  c10::SetCPUAllocator(g_installed, /*priority=*/100);
}

void return_cpu_memory() {
  if (g_installed != nullptr) g_installed->return_free_blocks();
}

void reset_cpu_memory_peak() {
  if (g_installed != nullptr) g_installed->reset_peak();
}

CpuMemoryCounts cpu_memory_counts() { return g_installed == nullptr ? CpuMemoryCounts{} : g_installed->counts(); }

}  // namespace cram
