#include <cuda_bf16.h>
#include <ucontext.h>

#include <stdexcept>
#include <vector>

namespace emulated_cuda {
namespace {

constexpr int kWarp = 32;
constexpr unsigned kMostThreads = 1024;
constexpr std::size_t kStackBytes = 64 << 10;

enum class State { kReady, kAtBlock, kAtWarp, kOver };

struct Thread {
  ucontext_t context{};
  std::vector<char> stack = std::vector<char>(kStackBytes);
  State state = State::kOver;
  int flag = 0;
  alignas(16) char slot[16] = {};
};

bool backwards = false;
int current = 0, count = 0;
ucontext_t scheduler;
const std::function<void()>* body = nullptr;

std::vector<Thread>& threads() {
  static std::vector<Thread> all(kMostThreads);
  return all;
}
Thread& thread(int number) { return threads()[static_cast<std::size_t>(number)]; }

void enter() {
  (*body)();
  thread(current).state = State::kOver;
  swapcontext(&thread(current).context, &scheduler);
}

void wait_as(State state) {
  Thread& self = thread(current);
  self.state = state;
  swapcontext(&self.context, &scheduler);
}

void resume(int number) {
  current = number;
  threadIdx = dim3(static_cast<unsigned>(number) % blockDim.x, static_cast<unsigned>(number) / blockDim.x, 0);
  swapcontext(&scheduler, &thread(number).context);
}

// Lets the threads of [begin, end) go on when all that are not over wait for `state`.
bool release(int begin, int end, State state) {
  int waiting = 0, over = 0;
  for (int t = begin; t < end; ++t) {
    waiting += thread(t).state == state ? 1 : 0;
    over += thread(t).state == State::kOver ? 1 : 0;
  }
  if (waiting == 0 || waiting + over < end - begin) return false;
  if (state == State::kAtWarp && over > 0) throw std::logic_error("a shuffle that a part of the warp does not reach");
  for (int t = begin; t < end; ++t) {
    if (thread(t).state == state) thread(t).state = State::kReady;
  }
  return true;
}

void run_block() {
  for (int t = 0; t < count; ++t) {
    Thread& fresh = thread(t);
    getcontext(&fresh.context);
    fresh.context.uc_stack.ss_sp = fresh.stack.data();
    fresh.context.uc_stack.ss_size = fresh.stack.size();
    fresh.context.uc_link = nullptr;
    fresh.state = State::kReady;
    fresh.flag = 0;
    makecontext(&fresh.context, enter, 0);
  }
  for (;;) {
    for (int i = 0; i < count; ++i) {
      const int t = backwards ? count - 1 - i : i;
      if (thread(t).state == State::kReady) resume(t);
    }
    bool moved = false, over = true;
    for (int begin = 0; begin < count; begin += kWarp) {
      moved = release(begin, std::min(count, begin + kWarp), State::kAtWarp) || moved;
    }
    moved = moved || release(0, count, State::kAtBlock);
    for (int t = 0; t < count; ++t) over = over && thread(t).state == State::kOver;
    if (over) return;
    if (!moved) throw std::logic_error("threads of a block wait for one another for ever");
  }
}

}  // namespace

void run(dim3 grid, dim3 block, const std::function<void()>& thread_body) {
  const unsigned size = block.x * block.y * block.z;
  if (size == 0 || size > kMostThreads || grid.x == 0 || grid.y == 0 || grid.y > 65535 || grid.z != 1 || block.z != 1) {
    throw std::logic_error("an illegal launch");
  }
  count = static_cast<int>(size);
  body = &thread_body;
  blockDim = block;
  gridDim = grid;
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) {
      blockIdx = dim3(backwards ? grid.x - 1 - x : x, y, 0);
      run_block();
    }
  }
}

void reverse(bool on) { backwards = on; }

void wait_for_block() { wait_as(State::kAtBlock); }
void wait_for_warp() { wait_as(State::kAtWarp); }

char* slot(int lane_distance) { return thread(current ^ lane_distance).slot; }

int any_of_block(int value) {
  thread(current).flag = value;
  wait_for_block();
  int any = 0;
  for (int t = 0; t < count; ++t) any |= thread(t).flag;
  wait_for_block();
  return any;
}

}  // namespace emulated_cuda
