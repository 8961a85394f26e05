// Errors and checks: two kinds of failure, one set of exit codes.
//
// CRAM_CHECK throws `Error` for faults of the user, the data, the machine or the file system: they are part of
// normal life and are always compiled in. CRAM_DCHECK is for our own bugs and vanishes in release builds. Neither may
// have side effects.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace cram {

/// Process exit codes; every program of this project uses these and no others (README, "Exit codes").
enum class ExitCode : int {
  kOk = 0,
  kOther = 1,
  kUsage = 2,               ///< command line or configuration
  kNoCheckpoint = 20,       ///< checkpoints exist but none is valid, or the folder is not ours
  kCheckpointStorage = 21,  ///< a checkpoint could not be written
  kData = 22,               ///< corpus, tokenizer or shard
  kPeerLost = 30,           ///< a rank died or did not answer in time
  kReplicasDiffer = 31,
  kNonFinite = 32,
  kOutOfMemory = 33,
  kPreempted = 75,  ///< stopped by a signal after saving; run the same command again
};

/// The one exception type of the project. `what()` says what was expected, what was found and what to do next.
class Error : public std::runtime_error {
 public:
  Error(ExitCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  [[nodiscard]] ExitCode code() const noexcept { return code_; }

 private:
  ExitCode code_;
};

/// Concatenates anything that can be streamed: `concat("expected ", 3, " rows")`.
template <class... Parts>
[[nodiscard]] std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

/// Throws `Error`; the parts are concatenated.
template <class... Parts>
[[noreturn]] void fail(ExitCode code, const Parts&... parts) {
  throw Error(code, concat(parts...));
}

/// "[4096,256]", for messages about tensors.
[[nodiscard]] std::string shape_text(const std::vector<std::int64_t>& shape);

namespace detail {
[[noreturn]] void dcheck_failed(const char* condition, const char* file, int line);
}

}  // namespace cram

/// Throws cram::Error with the exit code when the condition is false. Message parts are only evaluated on failure.
#define CRAM_CHECK(condition, code, ...) \
  do {                                   \
    if (!(condition)) [[unlikely]]       \
      ::cram::fail((code), __VA_ARGS__); \
  } while (false)

#ifdef NDEBUG
#define CRAM_DCHECK(condition) \
  do {                         \
  } while (false)
#else
/// Aborts with file and line: a broken invariant of our own. Off in release builds.
#define CRAM_DCHECK(condition)                                       \
  do {                                                               \
    if (!(condition)) [[unlikely]]                                   \
      ::cram::detail::dcheck_failed(#condition, __FILE__, __LINE__); \
  } while (false)
#endif
