#include "base/folder_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/file_io.h"

namespace cram {

FolderLock::FolderLock(const std::string& folder, const std::string& doing, ExitCode code) {
  make_folders(folder, code);
  fd_ = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  CRAM_CHECK(fd_ >= 0, code, "cannot open ", folder, ": ", std::strerror(errno));
  if (::flock(fd_, LOCK_EX | LOCK_NB) == 0) return;
  ::close(std::exchange(fd_, -1));
  fail(ExitCode::kUsage, "another process ", doing, " ", folder, "; wait for it or choose another folder");
}

FolderLock::~FolderLock() {
  if (fd_ >= 0) ::close(fd_);
}

FolderLock::FolderLock(FolderLock&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

FolderLock& FolderLock::operator=(FolderLock&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

}  // namespace cram
