// "Every 25 steps", "every 30 minutes of training clock", "every 1e9 tokens".
#pragma once

#include "run/budget_clock.h"

namespace cram {

class Interval {
 public:
  explicit Interval(const Quantity& every) : every_(every) {}

  /// True when the step from `before` to `after` crossed a multiple of the interval; never for an interval of 0. A
  /// function of progress alone, so a resumed run is due at the same steps.
  [[nodiscard]] bool crossed(const Progress& before, const Progress& after) const {
    return every_.value > 0 && count(before) != count(after);
  }

 private:
  [[nodiscard]] std::int64_t count(const Progress& p) const {
    const double position = every_.is_time()         ? p.elapsed_s / every_.seconds()
                            : every_.unit == "steps" ? static_cast<double>(p.step) / every_.value
                                                     : static_cast<double>(p.tokens) / every_.value;
    return static_cast<std::int64_t>(position);
  }
  Quantity every_;
};

}  // namespace cram
