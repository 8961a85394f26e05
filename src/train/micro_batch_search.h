// train.micro_batch_size=auto: the fastest micro-batch of this model on this device, measured once before the training
// clock starts, remembered for the next run, stored with the run and never measured again when it is resumed.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "train/train_config.h"

namespace cram {

/// Sizes that can be chosen, ascending: powers of two up to 4096 that divide a data rank's share of train.batch_quantum
/// (with interleaved stages, of a group of micro-batches), and the share itself where it is small. Never empty for a
/// resolved configuration.
[[nodiscard]] std::vector<std::int64_t> micro_batch_candidates(const Config& config, const Layout& layout);

/// The candidate nearest to a size that was chosen for another layout.
[[nodiscard]] std::int64_t nearest_micro_batch(const Config& config, const Layout& layout, std::int64_t wanted);

struct MicroBatchFound {
  std::int64_t rows = 0;
  std::vector<std::pair<std::int64_t, double>> tried;  ///< size, tokens/s
};

/// Measures sizes from the smallest on: `tokens_per_s` returns nothing where a size does not fit the memory, which ends
/// the search, as do two sizes in a row that are slower than the best one, and `out_of_time`. Found is the smallest
/// size within 2 % of the best one: a smaller one needs less memory. Throws Error(kUsage) when not even the first fits.
[[nodiscard]] MicroBatchFound search_micro_batch(
    const std::vector<std::int64_t>& candidates,
    const std::function<std::optional<double>(std::int64_t rows)>& tokens_per_s,
    const std::function<bool(std::int64_t next_rows)>& out_of_time);

/// What was found before, in one small JSON file: $XDG_CACHE_HOME/cram/micro_batch.json, ~/.cache by default. A file
/// that cannot be read or written is a warning, never an error.
class MicroBatchCache {
 public:
  /// "" = nowhere.
  explicit MicroBatchCache(std::string file) : file_(std::move(file)) {}
  [[nodiscard]] static std::string default_file();
  [[nodiscard]] std::optional<std::int64_t> find(const std::string& key) const;
  void remember(const std::string& key, std::int64_t rows) const;
  [[nodiscard]] const std::string& file() const { return file_; }

 private:
  std::string file_;
};

/// All that the speed depends on: `device` (its kind and the threads in use), number format, program, model and layout.
[[nodiscard]] std::string micro_batch_key(const Config& config, const Layout& layout, const std::string& device);

}  // namespace cram
