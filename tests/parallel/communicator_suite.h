// What every communicator backend must do, written once. A rank function gets its own communicator; sizes 1..8, element
// counts 0, 1 and non-multiples, and integer-valued floats, so that every result is exact.
#pragma once

#include <gtest/gtest.h>
#include <torch/types.h>

#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/check.h"
#include "parallel/communicator.h"

namespace cram::test {

/// Throws instead of recording: rank functions run on threads or in other processes, where gtest's own assertions of a
/// failing rank would leave the others waiting.
inline void require(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

/// Where the suite makes its tensors; one for each rank, since ranks may be threads.
inline thread_local at::Device suite_device = at::kCPU;

inline at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type = at::kFloat) {
  return at::empty(sizes, at::TensorOptions(type).device(suite_device));
}
inline at::Tensor full(at::IntArrayRef sizes, double value, at::ScalarType type = at::kFloat) {
  return empty(sizes, type).fill_(value);
}
inline at::Tensor ones(at::IntArrayRef sizes, at::ScalarType type = at::kFloat) { return full(sizes, 1, type); }
inline at::Tensor zeros(at::IntArrayRef sizes, at::ScalarType type = at::kFloat) { return full(sizes, 0, type); }

/// Element i of rank r: small whole numbers, exact in bf16 up to sums over 8 ranks.
inline at::Tensor numbered(std::int64_t count, int rank, at::ScalarType type) {
  return at::arange(count, at::kLong).remainder(7).add(rank).to(suite_device, type);
}

inline at::Tensor sum_over_ranks(std::int64_t count, int size, at::ScalarType type) {
  at::Tensor sum = numbered(count, 0, type);
  for (int r = 1; r < size; ++r) sum = sum + numbered(count, r, type);
  return sum;
}

inline void require_equal(const at::Tensor& got, const at::Tensor& expected, const std::string& what) {
  require(got.scalar_type() == expected.scalar_type() && at::equal(got.view({-1}), expected.view({-1})), what);
}

constexpr at::ScalarType kTypes[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kLong};
constexpr std::int64_t kCounts[] = {0, 1, 5, 64, 1000};

inline void check_all_reduce(Communicator& c) {
  for (const at::ScalarType type : kTypes) {
    for (const std::int64_t count : kCounts) {
      const at::Tensor sum = numbered(count, c.rank(), type);
      c.all_reduce_(sum);
      require_equal(sum, sum_over_ranks(count, c.size(), type), "all_reduce_ sum");
      const at::Tensor max = numbered(count, c.rank(), type);
      c.all_reduce_(max, ReduceOp::kMax);
      require_equal(max, numbered(count, c.size() - 1, type), "all_reduce_ max");
    }
  }
}

inline void check_all_gather(Communicator& c) {
  for (const at::ScalarType type : kTypes) {
    for (const std::int64_t count : kCounts) {
      const at::Tensor out = full({c.size() * count}, -1, type);
      c.all_gather(out, numbered(count, c.rank(), type));
      for (int r = 0; r < c.size(); ++r)
        require_equal(out.narrow(0, r * count, count), numbered(count, r, type), "all_gather");
    }
  }
}

inline void check_reduce_scatter(Communicator& c) {
  for (const at::ScalarType type : kTypes) {
    for (const std::int64_t count : kCounts) {
      const at::Tensor out = full({count}, -1, type);
      c.reduce_scatter(out, numbered(c.size() * count, c.rank(), type));
      require_equal(out, sum_over_ranks(c.size() * count, c.size(), type).narrow(0, c.rank() * count, count),
                    "reduce_scatter");
    }
  }
}

inline void check_broadcast(Communicator& c) {
  for (const at::ScalarType type : kTypes) {
    for (const std::int64_t count : kCounts) {
      for (int root = 0; root < c.size(); ++root) {
        const at::Tensor tensor = numbered(count, c.rank() + 3, type);
        c.broadcast_(tensor, root);
        require_equal(tensor, numbered(count, root + 3, type), "broadcast_");
      }
    }
  }
}

/// Everybody to everybody at once, then a ring: neither may deadlock.
inline void check_exchange(Communicator& c) {
  for (const at::ScalarType type : kTypes) {
    for (const std::int64_t count : kCounts) {
      std::vector<Message> sends, receives;
      for (int r = 0; r < c.size(); ++r) {
        sends.push_back({r, numbered(count, 10 * c.rank() + r, type)});
        receives.push_back({r, full({count}, -1, type)});
      }
      c.exchange_(sends, receives);
      for (int r = 0; r < c.size(); ++r) {
        require_equal(receives[static_cast<std::size_t>(r)].tensor, numbered(count, 10 * r + c.rank(), type),
                      "exchange_");
      }
      const at::Tensor from_left = full({count}, -1, type);
      const int right = (c.rank() + 1) % c.size();
      const int left = (c.rank() + c.size() - 1) % c.size();
      c.exchange_({{right, numbered(count, c.rank(), type)}}, {{left, from_left}});
      require_equal(from_left, numbered(count, left, type), "ring");
    }
  }
}

/// Two messages between the same ranks arrive in order.
inline void check_message_order(Communicator& c) {
  const int right = (c.rank() + 1) % c.size();
  const int left = (c.rank() + c.size() - 1) % c.size();
  const at::Tensor first = full({4}, -1, at::kFloat), second = full({4}, -1, at::kFloat);
  c.exchange_({{right, full({4}, 1.0F)}, {right, full({4}, 2.0F)}}, {{left, first}, {left, second}});
  require_equal(first, full({4}, 1.0F), "first message");
  require_equal(second, full({4}, 2.0F), "second message");
}

inline void check_send_recv(Communicator& c) {
  if (c.size() < 2) return;
  const at::Tensor tensor = full({17}, static_cast<float>(c.rank()));
  if (c.rank() == 0) c.send(tensor, c.size() - 1);
  if (c.rank() == c.size() - 1) {
    c.recv_(tensor, 0);
    require_equal(tensor, zeros({17}), "recv_");
  }
}

/// Several operations in flight, waited for in another order.
inline void check_asynchronous(Communicator& c) {
  const at::Tensor a = numbered(1000, c.rank(), at::kFloat), b = numbered(77, c.rank(), at::kFloat);
  const at::Tensor gathered = full({c.size() * 5}, -1, at::kFloat);
  const at::Tensor mine = numbered(5, c.rank(), at::kFloat);
  Work reduce_a = c.all_reduce_async_(a);
  Work gather = c.all_gather_async(gathered, mine);
  Work reduce_b = c.all_reduce_async_(b);
  reduce_b.wait();
  gather.wait();
  reduce_a.wait();
  reduce_a.wait();  // a second time is nothing
  require_equal(a, sum_over_ranks(1000, c.size(), at::kFloat), "first all_reduce");
  require_equal(b, sum_over_ranks(77, c.size(), at::kFloat), "second all_reduce");
  for (int r = 0; r < c.size(); ++r)
    require_equal(gathered.narrow(0, r * 5, 5), numbered(5, r, at::kFloat), "all_gather");
}

/// Sends go on in the background; receives pick by tag, not by the order of sending.
inline void check_tags_and_background_sends(Communicator& c) {
  const int right = (c.rank() + 1) % c.size();
  const int left = (c.rank() + c.size() - 1) % c.size();
  const at::Tensor big = numbered(100'000, c.rank(), at::kFloat);
  Work first = c.exchange_async_({{right, big, 7}}, {});
  Work second = c.exchange_async_({{right, full({3}, 2.0F), 9}}, {});
  const at::Tensor small = empty({3}), large = empty({100'000});
  c.exchange_({}, {{left, small, 9}});
  c.exchange_({}, {{left, large, 7}});
  require_equal(small, full({3}, 2.0F), "the second message by its tag");
  require_equal(large, numbered(100'000, left, at::kFloat), "the first message by its tag");
  c.barrier();  // every receiver has its messages
  while (!first.done() || !second.done()) std::this_thread::yield();
  first.wait();
  second.wait();
  require(first.done(), "over after waiting");
}

/// A rank's part may lie in the gathered tensor already.
inline void check_gather_in_place(Communicator& c) {
  const at::Tensor all = full({c.size() * 33}, -1, at::kFloat);
  const at::Tensor mine = all.narrow(0, c.rank() * 33, 33);
  mine.copy_(numbered(33, c.rank(), at::kFloat));
  c.all_gather(all, mine);
  for (int r = 0; r < c.size(); ++r) {
    require_equal(all.narrow(0, r * 33, 33), numbered(33, r, at::kFloat), "gathered in place");
  }
}

/// Ranks that do not call the same thing are told so, both sides named.
inline void check_calls_compared(Communicator& c) {
  if (c.size() < 2) return;
  const std::unique_ptr<Communicator> checked = c.split(0, c.rank(), "checked");
  checked->check_calls(true);
  const at::Tensor sum = ones({5});
  checked->all_reduce_(sum);
  require_equal(sum, full({5}, static_cast<float>(c.size())), "equal calls");
  std::string message;
  try {
    if (c.rank() == 1) {
      checked->barrier();
    } else {
      checked->all_reduce_(ones({12}));
    }
  } catch (const Error& error) {
    message = error.what();
  }
  require(message.find("all_reduce of") != std::string::npos && message.find("barrier") != std::string::npos,
          "both sides: " + message);
  c.barrier();
}

/// Even and odd ranks, keys in reverse order.
inline void check_split(Communicator& c) {
  const int color = c.rank() % 2;
  const std::unique_ptr<Communicator> part = c.split(color, -c.rank(), color == 0 ? "even" : "odd");
  const int members = (c.size() + 1 - color) / 2;
  require(part->size() == members, "size of a part");
  require(part->rank() == members - 1 - c.rank() / 2, "rank by key");
  require(part->name() == (color == 0 ? "even" : "odd"), "name");
  const at::Tensor sum = full({3}, static_cast<double>(c.rank()), at::kDouble);
  part->all_reduce_(sum);
  double expected = 0;
  for (int r = color; r < c.size(); r += 2) expected += r;
  require_equal(sum, full({3}, expected, at::kDouble), "sum inside a part");
  c.barrier();
}

/// Bits of a floating-point sum are equal on every rank, whatever the order of arrival.
inline void check_same_bits(Communicator& c) {
  at::Tensor values = at::empty({4097}, at::kFloat);
  for (std::int64_t i = 0; i < values.numel(); ++i) {
    values.data_ptr<float>()[i] = static_cast<float>((i * 7919 + c.rank() * 104729) % 10007) / 317.0F;
  }
  values = values.to(suite_device);
  c.all_reduce_(values);
  const at::Tensor everybody = empty({c.size() * values.numel()}, at::kFloat);
  c.all_gather(everybody, values);
  for (int r = 0; r < c.size(); ++r) {
    require_equal(everybody.narrow(0, r * values.numel(), values.numel()), values,
                  "the sum's bits differ between ranks");
  }
}

/// Bytes by the usual count, and the same trace on every rank.
inline void check_trace(Communicator& c) {
  c.trace().reset_bytes();
  const std::int64_t before = c.trace().operations();
  c.all_reduce_(ones({100}, at::kFloat));
  c.all_gather(empty({c.size() * 10}, at::kDouble), ones({10}, at::kDouble));
  c.reduce_scatter(empty({6}, at::kBFloat16), ones({c.size() * 6}, at::kBFloat16));
  c.barrier();
  const double n = c.size();
  const auto& bytes = c.trace().bytes();
  require(std::abs(bytes.at("all_reduce") - 400 * 2 * (n - 1) / n) < 1e-9, "bytes of all_reduce");
  require(std::abs(bytes.at("all_gather") - 80 * (n - 1)) < 1e-9, "bytes of all_gather");
  require(std::abs(bytes.at("reduce_scatter") - 12 * (n - 1)) < 1e-9, "bytes of reduce_scatter");
  require(c.trace().operations() == before + 4, "operations counted");
  require(c.trace().entries().back().operation == "barrier", "last entry");
}

/// Misuse is refused before anything is sent, so the group stays usable.
inline void check_refusals(Communicator& c) {
  const auto refused = [](const auto& action) {
    try {
      action();
    } catch (const Error&) {
      return true;
    }
    return false;
  };
  require(refused([&] { c.all_reduce_(ones({4, 4}).t()); }), "a tensor that is not contiguous");
  require(refused([&] { c.all_reduce_(at::Tensor()); }), "an undefined tensor");
  require(refused([&] { c.all_gather(ones({c.size() * 3 + 1}), ones({3})); }), "a gather of the wrong size");
  require(refused([&] { c.reduce_scatter(ones({3}), ones({c.size() * 3 + 1})); }), "a scatter of the wrong size");
  require(refused([&] { c.all_gather(ones({c.size()}), ones({1}, at::kDouble)); }), "two types");
  require(refused([&] { c.send(ones({1}), c.size()); }), "an unknown peer");
  require(refused([&] { c.broadcast_(ones({1}), -1); }), "an unknown root");
  const at::Tensor sum = ones({2});
  c.all_reduce_(sum);
  require_equal(sum, full({2}, static_cast<float>(c.size())), "still usable");
}

struct SuiteRow {
  const char* name;
  void (*check)(Communicator&);
};
constexpr SuiteRow kSuite[] = {
    {"AllReduce", check_all_reduce},
    {"AllGather", check_all_gather},
    {"ReduceScatter", check_reduce_scatter},
    {"Broadcast", check_broadcast},
    {"Exchange", check_exchange},
    {"MessageOrder", check_message_order},
    {"SendRecv", check_send_recv},
    {"Asynchronous", check_asynchronous},
    {"TagsAndBackgroundSends", check_tags_and_background_sends},
    {"GatherInPlace", check_gather_in_place},
    {"CallsCompared", check_calls_compared},
    {"Split", check_split},
    {"SameBits", check_same_bits},
    {"Trace", check_trace},
    {"Refusals", check_refusals},
};

}  // namespace cram::test
