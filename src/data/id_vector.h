// Token ids in memory at the width a shard has on disk: 2 bytes, 4 above 65,536 entries.
#pragma once

#include <cstdint>
#include <vector>

namespace cram {

class IdVector {
 public:
  explicit IdVector(std::int64_t vocab_size) : wide_(vocab_size > 65536) {}

  void push_back(std::uint32_t id) {
    if (wide_) {
      wide_ids_.push_back(id);
    } else {
      narrow_ids_.push_back(static_cast<std::uint16_t>(id));
    }
  }
  void reserve(std::int64_t count) {
    if (wide_) {
      wide_ids_.reserve(static_cast<std::size_t>(count));
    } else {
      narrow_ids_.reserve(static_cast<std::size_t>(count));
    }
  }
  [[nodiscard]] std::uint32_t operator[](std::int64_t index) const {
    const auto i = static_cast<std::size_t>(index);
    return wide_ ? wide_ids_[i] : narrow_ids_[i];
  }
  [[nodiscard]] std::int64_t size() const {
    return static_cast<std::int64_t>(wide_ ? wide_ids_.size() : narrow_ids_.size());
  }

 private:
  bool wide_;
  std::vector<std::uint16_t> narrow_ids_;
  std::vector<std::uint32_t> wide_ids_;
};

}  // namespace cram
