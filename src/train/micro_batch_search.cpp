#include "train/micro_batch_search.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/file_io.h"
#include "base/log.h"
#include "base/version.h"

namespace cram {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::int64_t kLargest = 4096;
constexpr double kNearlyAsFast = 0.98;
constexpr std::size_t kLargestFile = 1 << 20;

// An object, or an empty one where there is nothing to read.
json read_cache(const std::string& file, bool warns) {
  std::error_code error;
  if (file.empty() || !fs::exists(file, error)) return json::object();
  json found = json::parse(read_file(file, ExitCode::kOther, kLargestFile), nullptr, /*allow_exceptions=*/false);
  if (found.is_object()) return found;
  if (warns) log_warning(file, " is damaged: the micro-batch sizes remembered there are lost");
  return json::object();
}

}  // namespace

std::vector<std::int64_t> micro_batch_candidates(const Config& config, const Layout& layout) {
  const std::int64_t group = config.parallel.virtual_stages > 1 ? layout.pipeline : 1;
  const std::int64_t share = config.train.batch_quantum / (layout.data * group);
  const auto fits = [&](std::int64_t rows) {
    return share % rows == 0 &&
           (!config.parallel.sequence_parallel || rows * config.model.seq_length % layout.tensor == 0);
  };
  std::vector<std::int64_t> candidates;
  for (std::int64_t rows = 1; rows <= std::min(share, kLargest); rows *= 2) {
    if (fits(rows)) candidates.push_back(rows);
  }
  if (share <= kLargest && fits(share) && (candidates.empty() || candidates.back() != share))
    candidates.push_back(share);
  CRAM_CHECK(!candidates.empty(), ExitCode::kUsage, "train.micro_batch_size=auto: no size up to ", kLargest,
             " divides the ", share, " rows of a data rank's share of train.batch_quantum=", config.train.batch_quantum,
             " and can be shared out to ", layout.tensor, " tensor ranks");
  // The smallest ones lose everywhere unless the batch itself is small.
  constexpr std::int64_t kSmallest = 8;
  const auto first = std::find_if(candidates.begin(), candidates.end(), [](std::int64_t r) { return r >= kSmallest; });
  if (first != candidates.end()) candidates.erase(candidates.begin(), first);
  return candidates;
}

std::int64_t nearest_micro_batch(const Config& config, const Layout& layout, std::int64_t wanted) {
  const std::vector<std::int64_t> candidates = micro_batch_candidates(config, layout);
  return *std::min_element(candidates.begin(), candidates.end(),
                           [&](std::int64_t a, std::int64_t b) { return std::abs(a - wanted) < std::abs(b - wanted); });
}

MicroBatchFound search_micro_batch(const std::vector<std::int64_t>& candidates,
                                   const std::function<std::optional<double>(std::int64_t rows)>& tokens_per_s,
                                   const std::function<bool(std::int64_t next_rows)>& out_of_time) {
  MicroBatchFound found;
  double best = 0;
  int slower = 0;
  for (const std::int64_t rows : candidates) {
    if (!found.tried.empty() && (slower == 2 || out_of_time(rows))) break;
    const std::optional<double> speed = tokens_per_s(rows);
    if (!speed) break;
    found.tried.emplace_back(rows, *speed);
    slower = *speed < best ? slower + 1 : 0;
    best = std::max(best, *speed);
  }
  CRAM_CHECK(!found.tried.empty(), ExitCode::kUsage, "train.micro_batch_size=auto: not even ", candidates.front(),
             " rows fit the memory; use a smaller model, model.recompute=layer, or more ranks");
  for (const auto& [rows, speed] : found.tried) {
    if (speed >= kNearlyAsFast * best) {
      found.rows = rows;
      break;
    }
  }
  return found;
}

std::string MicroBatchCache::default_file() {
  const auto variable = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string(value == nullptr ? "" : value);
  };
  const std::string cache = variable("XDG_CACHE_HOME"), home = variable("HOME");
  if (cache.rfind('/', 0) == 0) return cache + "/cram/micro_batch.json";
  return home.empty() ? "" : home + "/.cache/cram/micro_batch.json";
}

std::optional<std::int64_t> MicroBatchCache::find(const std::string& key) const {
  try {
    const json all = read_cache(file_, /*warns=*/true);
    const auto entry = all.find(key);
    if (entry == all.end() || !entry->is_number_integer()) return std::nullopt;
    return entry->get<std::int64_t>();
  } catch (const Error& error) {
    log_warning("measured micro-batch sizes cannot be read: ", error.what());
    return std::nullopt;
  }
}

void MicroBatchCache::remember(const std::string& key, std::int64_t rows) const {
  if (file_.empty()) {
    log_info("the measured micro-batch size is not remembered: neither XDG_CACHE_HOME nor HOME is set");
    return;
  }
  try {
    json all = read_cache(file_, /*warns=*/false);
    all[key] = rows;
    make_folders(fs::path(file_).parent_path());
    write_file_atomically(file_, all.dump(1) + "\n");
  } catch (const Error& error) {
    log_warning("the measured micro-batch size cannot be remembered: ", error.what());
  }
}

std::string micro_batch_key(const Config& config, const Layout& layout, const std::string& device) {
  const ModelConfig& m = config.model;
  return concat(device, ", ", config.train.precision, ", cram ", version(), " ", build_description(), ", ", m.layers,
                "x", m.hidden, ", ", m.heads, " heads, ffn ", m.ffn, ", vocabulary ", m.vocab_size, ", sequence ",
                m.seq_length, ", recompute ", m.recompute, ", dropout ", m.dropout, ", masked ", config.train.mask_rate,
                ", quantum ", config.train.batch_quantum, ", layout ", layout.text(), ", virtual stages ",
                config.parallel.virtual_stages, ", sequence parallel ", config.parallel.sequence_parallel, ", zero ",
                config.parallel.zero, ", ", config.train.objective, ", ", config.train.optimizer, ", ", m.structure,
                ", ", m.positions);
}

}  // namespace cram
