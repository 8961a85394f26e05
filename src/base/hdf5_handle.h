// What the two files that speak HDF5 share: an owner of identifiers, and how files are opened. Without hdf5.h, whose
// hid_t and herr_t are these integers.
#pragma once

#include <cstdint>
#include <mutex>
#include <utility>

namespace cram {

/// Held during every call of the library: most builds of it know no threads, and ours has several that read (loader,
/// evaluation, checkpoints).
[[nodiscard]] std::unique_lock<std::recursive_mutex> hdf5_lock();

/// Owns one HDF5 identifier.
class Hdf5Handle {
 public:
  using Close = int (*)(std::int64_t);
  Hdf5Handle(std::int64_t id, Close closer) noexcept : id_(id), close_(closer) {}
  Hdf5Handle(Hdf5Handle&& other) noexcept : id_(std::exchange(other.id_, -1)), close_(other.close_) {}
  Hdf5Handle& operator=(Hdf5Handle&&) = delete;
  ~Hdf5Handle() {
    if (id_ < 0) return;
    const auto lock = hdf5_lock();
    close_(id_);
  }
  [[nodiscard]] std::int64_t get() const noexcept { return id_; }
  [[nodiscard]] bool valid() const noexcept { return id_ >= 0; }
  /// For writers: a close can be the call that finds the disk full.
  [[nodiscard]] int close() noexcept {
    const auto lock = hdf5_lock();
    return close_(std::exchange(id_, -1));
  }

 private:
  std::int64_t id_;
  Close close_;
};

/// How every file of ours is opened: without locks (files are immutable once they have their name, and storage may be
/// read-only or without locks), in a format that HDF5 1.10 and h5py read, everything closed with the file. Sets HDF5
/// up. Throws Error(kOther) when HDF5 refuses.
[[nodiscard]] Hdf5Handle hdf5_file_access();

}  // namespace cram
