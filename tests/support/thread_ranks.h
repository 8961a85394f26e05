// Ranks as threads: runs one function a rank and reports the first exception of each.
#pragma once

#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "parallel/communicator.h"

namespace cram {

/// `size` ranks that are threads of this process, one object each; for tests of multi-rank code, on tensors of a CPU or
/// of one GPU that all ranks share. Reductions run in rank order. A rank that is destroyed while others wait for it
/// makes their operations throw Error(kPeerLost).
[[nodiscard]] std::vector<std::unique_ptr<Communicator>> make_thread_communicators(int size);

}  // namespace cram

namespace cram::test {

/// Runs `body` on `size` threads with a communicator each. A rank that throws drops its communicator, so that the
/// others end too. Returns the messages, "" where a rank ended well.
inline std::vector<std::string> run_ranks(int size, const std::function<void(Communicator&)>& body) {
  std::vector<std::unique_ptr<Communicator>> ranks = make_thread_communicators(size);
  std::vector<std::string> messages(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  threads.reserve(ranks.size());
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    threads.emplace_back([&, r] {
      try {
        body(*ranks[r]);
      } catch (const std::exception& error) {
        messages[r] = error.what();
        if (messages[r].empty()) messages[r] = "an exception without a message";
        ranks[r].reset();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return messages;
}

}  // namespace cram::test
