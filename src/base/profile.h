// Where the time goes: sections that add up, measured only while somebody listens.
//
// A listener is installed for the calling thread by a scope; without one a section costs one look at a thread-local
// pointer. A section inside another counts in both: add up leaves only.
#pragma once

#include <array>
#include <chrono>

namespace cram {

enum class Section { kGemm, kAttention, kNorm, kElementwise, kEmbedding, kLoss, kOptimizer, kDataWait, kCount };

[[nodiscard]] constexpr const char* section_name(Section section) {
  constexpr const char* kNames[] = {"gemm",      "attention", "norm",      "elementwise",
                                    "embedding", "loss",      "optimizer", "data_wait"};
  return kNames[static_cast<int>(section)];
}

class Profile {
 public:
  /// Listens on this thread for its lifetime. `settle` is called before every look at the clock: a device that works
  /// behind the program's back has to be waited for, which slows what is measured.
  explicit Profile(void (*settle)() = nullptr) : before_(current()), settle_(settle) { current() = this; }
  ~Profile() { current() = before_; }
  Profile(const Profile&) = delete;
  Profile& operator=(const Profile&) = delete;

  [[nodiscard]] double seconds(Section section) const { return seconds_[static_cast<std::size_t>(section)]; }
  [[nodiscard]] double total_s() const {
    double total = 0;
    for (const double s : seconds_) total += s;
    return total;
  }
  void clear() { seconds_ = {}; }

 private:
  friend class Timed;
  static Profile*& current() {
    thread_local Profile* listener = nullptr;
    return listener;
  }
  [[nodiscard]] std::chrono::steady_clock::time_point now() const {
    if (settle_ != nullptr) settle_();
    return std::chrono::steady_clock::now();
  }
  Profile* before_;
  void (*settle_)();
  double inner_s_ = 0;  // of sections that ended inside the one that is open
  std::array<double, static_cast<std::size_t>(Section::kCount)> seconds_{};
};

/// The time of its scope goes to a section.
class Timed {
 public:
  explicit Timed(Section section) : profile_(Profile::current()), section_(section) {
    if (profile_ == nullptr) return;
    outer_inner_s_ = profile_->inner_s_;
    profile_->inner_s_ = 0;
    from_ = profile_->now();
  }
  ~Timed() {
    if (profile_ == nullptr) return;
    const double passed_s = std::chrono::duration<double>(profile_->now() - from_).count();
    profile_->seconds_[static_cast<std::size_t>(section_)] += passed_s - profile_->inner_s_;
    profile_->inner_s_ = outer_inner_s_ + passed_s;
  }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  Profile* profile_;
  Section section_;
  double outer_inner_s_ = 0;
  std::chrono::steady_clock::time_point from_;
};

}  // namespace cram
