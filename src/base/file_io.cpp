#include "base/file_io.h"

#include <fcntl.h>
#include <ftw.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

namespace cram {
namespace {

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) noexcept : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&&) = delete;
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  [[nodiscard]] int get() const noexcept { return fd_; }
  /// close() can report a delayed write error (NFS, quota), so a writer must look at it.
  [[nodiscard]] int close() noexcept { return ::close(std::exchange(fd_, -1)); }

 private:
  int fd_;
};
static_assert(!std::is_copy_constructible_v<FileDescriptor>);

int open_retrying(const std::filesystem::path& path, int flags, mode_t mode = 0) {
  int fd = -1;
  do {
    fd = ::open(path.c_str(), flags | O_CLOEXEC, mode);
  } while (fd < 0 && errno == EINTR);
  return fd;
}

std::string reason() { return std::strerror(errno); }

void sync_path(const std::filesystem::path& path, int flags, ExitCode code) {
  const FileDescriptor fd(open_retrying(path, flags));
  CRAM_CHECK(fd.get() >= 0, code, "cannot open ", path.string(), " to sync it: ", reason());
  CRAM_CHECK(::fsync(fd.get()) == 0, code, "fsync of ", path.string(), " failed: ", reason());
}

}  // namespace

std::string read_file(const std::filesystem::path& path, ExitCode code, std::uintmax_t limit) {
  // Non-blocking, or a FIFO without a writer would hang us here.
  const FileDescriptor fd(open_retrying(path, O_RDONLY | O_NONBLOCK));
  CRAM_CHECK(fd.get() >= 0, code, "cannot read ", path.string(), ": ", reason());
  struct stat info {};
  CRAM_CHECK(::fstat(fd.get(), &info) == 0, code, "cannot stat ", path.string(), ": ", reason());
  CRAM_CHECK(S_ISREG(info.st_mode), code, path.string(),
             S_ISDIR(info.st_mode) ? " is a folder" : " is not a regular file", ", expected a file");
  CRAM_CHECK(static_cast<std::uintmax_t>(info.st_size) <= limit, code, path.string(), " has ", info.st_size,
             " bytes, at most ", limit, " are read");
  std::string content;
  content.reserve(static_cast<std::size_t>(info.st_size));
  char block[1 << 16];
  while (true) {
    const ssize_t got = ::read(fd.get(), block, sizeof block);
    if (got < 0 && errno == EINTR) continue;
    CRAM_CHECK(got >= 0, code, "reading ", path.string(), " failed: ", reason());
    if (got == 0) return content;
    content.append(block, static_cast<std::size_t>(got));
    CRAM_CHECK(content.size() <= limit, code, path.string(), " is larger than ", limit, " bytes");
  }
}

void write_file_atomically(const std::filesystem::path& path, std::string_view content, ExitCode code) {
  const std::filesystem::path temporary = path.string() + temporary_suffix();
  try {
    FileDescriptor fd(open_retrying(temporary, O_WRONLY | O_CREAT | O_EXCL, 0644));
    CRAM_CHECK(fd.get() >= 0, code, "cannot create ", temporary.string(), ": ", reason());
    std::string_view rest = content;
    while (!rest.empty()) {
      const ssize_t put = ::write(fd.get(), rest.data(), rest.size());
      if (put < 0 && errno == EINTR) continue;
      CRAM_CHECK(put > 0, code, "writing ", path.string(), " (", content.size(), " bytes) failed: ", reason());
      rest.remove_prefix(static_cast<std::size_t>(put));
    }
    CRAM_CHECK(::fsync(fd.get()) == 0, code, "fsync of ", path.string(), " failed: ", reason());
    CRAM_CHECK(fd.close() == 0, code, "closing ", path.string(), " failed: ", reason());
    rename_path(temporary, path, code);
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
  sync_folder(path.has_parent_path() ? path.parent_path() : std::filesystem::path("."), code);
}

void sync_file(const std::filesystem::path& path, ExitCode code) { sync_path(path, O_RDONLY, code); }
void sync_folder(const std::filesystem::path& folder, ExitCode code) {
  sync_path(folder, O_RDONLY | O_DIRECTORY, code);
}

void rename_path(const std::filesystem::path& from, const std::filesystem::path& to, ExitCode code) {
  CRAM_CHECK(::rename(from.c_str(), to.c_str()) == 0, code, "cannot rename ", from.string(), " to ", to.string(), ": ",
             reason());
}

void make_folders(const std::filesystem::path& folder, ExitCode code) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  CRAM_CHECK(!error && std::filesystem::is_directory(folder), code, "cannot create the folder ", folder.string(), ": ",
             error ? error.message() : "something else has that name");
}

void remove_tree(const std::filesystem::path& path, ExitCode code) {
  const auto remove_one = [](const char* name, const struct stat*, int, struct FTW*) { return ::remove(name); };
  const bool removed = ::nftw(path.c_str(), remove_one, 16, FTW_DEPTH | FTW_PHYS) == 0;
  CRAM_CHECK(removed || errno == ENOENT, code, "cannot remove ", path.string(), ": ", reason());
}

std::string temporary_suffix() {
  static std::atomic<unsigned> counter{0};
  const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  return concat(".tmp-", ::getpid(), "-", now, "-", counter++);
}

bool is_temporary_name(std::string_view name) { return name.find(".tmp-") != std::string_view::npos; }

}  // namespace cram
