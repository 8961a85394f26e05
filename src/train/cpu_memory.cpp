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
#include <unordered_map>
#include <vector>

namespace cram {
namespace {

constexpr std::size_t kHeader = 64;  // before a small block; keeps the data on a cache line of its own
constexpr std::size_t kHugePage = 2UL << 20;
constexpr std::size_t kSmallest = 4096;  // smaller ones cost malloc nothing

struct Header {
  std::size_t size_class = 0;  // bytes with the header
};

std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Eighths of the power of two below: at most an eighth is wasted, and shapes that recur meet the same class. Large
// blocks are whole huge pages without a header, which would cost a tensor of exactly 2 MiB a page of its own.
std::size_t size_class_of(std::size_t bytes) {
  const std::size_t needed = std::max(bytes + kHeader, kSmallest);
  const std::size_t rounded = round_up(needed, std::max<std::size_t>(kHeader, std::bit_floor(needed) / 8));
  return rounded < kHugePage ? rounded : round_up(round_up(bytes, std::bit_floor(bytes) / 8), kHugePage);
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
        if (size_class < kHugePage) {
          c10::free_cpu(static_cast<char*>(data) - kHeader);
        } else {
          large_.erase(data);
          munmap(data, size_class);
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
    if (size_class >= kHugePage) {
      void* data = from_system(size_class);
      const std::lock_guard lock(mutex_);
      large_.emplace(data, size_class);
      return data;
    }
    void* block = c10::alloc_cpu(size_class);
    new (block) Header{size_class};
    return static_cast<char*>(block) + kHeader;
  }

  // A small block may lie at a huge page's boundary too, but not where a large one is.
  [[nodiscard]] std::size_t size_class_at(void* data) const {
    if (reinterpret_cast<std::uintptr_t>(data) % kHugePage == 0) {
      const auto large = large_.find(data);
      if (large != large_.end()) return large->second;
    }
    return reinterpret_cast<const Header*>(static_cast<char*>(data) - kHeader)->size_class;
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
    const std::lock_guard lock(mutex_);
    const std::size_t size_class = size_class_at(data);
    counts_.bytes_in_use -= static_cast<std::int64_t>(size_class);
    free_[size_class].push_back(data);
  }

  std::mutex mutex_;
  std::map<std::size_t, std::vector<void*>> free_;
  std::unordered_map<void*, std::size_t> large_;  // bytes of the blocks from whole huge pages
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
