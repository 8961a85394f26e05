// One writer a folder: an exclusive lock on the folder itself, which goes with the process that holds it.
#pragma once

#include <string>

#include "base/check.h"

namespace cram {

class FolderLock {
 public:
  FolderLock() = default;
  /// Creates the folder where it is missing (Error(code) when that fails). Error(kUsage) when another process holds it:
  /// "another process <doing> <folder>".
  FolderLock(const std::string& folder, const std::string& doing, ExitCode code = ExitCode::kOther);
  ~FolderLock();
  FolderLock(FolderLock&& other) noexcept;
  FolderLock& operator=(FolderLock&& other) noexcept;

  [[nodiscard]] bool held() const noexcept { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

}  // namespace cram
