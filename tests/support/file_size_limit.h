// A disk that fills up: while an object lives, no file of this process grows beyond a number of bytes.
#pragma once

#include <sys/resource.h>

#include <csignal>
#include <cstdint>

#if defined(__SANITIZE_ADDRESS__)
// HDF5 keeps what belongs to a file that it could not close, and its clean-up at exit is off (base/hdf5_file.h).
extern "C" __attribute__((used)) inline const char* __lsan_default_suppressions() {  // NOLINT: the sanitizer's own name
  return "leak:libhdf5";
}
#endif

namespace cram::test {

class FileSizeLimit {
 public:
  explicit FileSizeLimit(std::uint64_t bytes) {
    previous_handler_ = std::signal(SIGXFSZ, SIG_IGN);  // write() then returns EFBIG
    ::getrlimit(RLIMIT_FSIZE, &previous_);
    const rlimit small{bytes, previous_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &small);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &previous_);
    std::signal(SIGXFSZ, previous_handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit previous_{};
  void (*previous_handler_)(int) = nullptr;
};

}  // namespace cram::test
