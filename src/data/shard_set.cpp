#include "data/shard_set.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <list>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/digest.h"
#include "base/log.h"
#include "data/shard.h"

namespace cram {
namespace {

constexpr std::size_t kCacheBytes = std::size_t{256} << 20U;
constexpr std::size_t kOpenFilesLimit = 64;

// Damage as one line of text a piece, for other processes.
std::string to_text(const std::vector<Damage>& damage) {
  std::string text;
  for (const Damage& d : damage) text += nlohmann::json({d.shard, d.message}).dump() + "\n";
  return text;
}

std::vector<Damage> damage_from(const std::string& text) {
  std::vector<Damage> damage;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const nlohmann::json entry = nlohmann::json::parse(line);
    damage.push_back({entry.at(0).get<std::string>(), entry.at(1).get<std::string>()});
  }
  return damage;
}

Manifest read_prepared(const std::string& folder, const std::string& split) {
  Manifest manifest = read_manifest(folder);
  CRAM_CHECK(manifest.kind == "shards" && manifest.splits.contains(split), ExitCode::kData, folder, " has no ", split,
             " data: it is a folder of kind '", manifest.kind,
             "'. Point data.shards at the output of `cram_data pack`");
  return manifest;
}

// What the checks found and may not be passed over.
void refuse(const std::string& folder, const std::vector<Damage>& damage, const ShardSetOptions& options) {
  CRAM_CHECK(damage.empty() || options.skip_bad_shards, ExitCode::kData, "the prepared data in ", folder,
             " is not whole:", damage_text(damage),
             "\nPrepare it again with `cram_data pack --force`, or copy it again");
}

}  // namespace

struct ShardSet::State {
  struct Shard {
    ShardFile file;
    std::int64_t first_row = 0;
    bool verified = false;
    std::optional<ShardReader> reader;
  };
  struct Block {
    std::uint64_t key;
    std::vector<std::uint32_t> ids;  // [<= kShardBlockRows, S]
  };

  std::string folder;
  std::string split;
  Manifest manifest;
  std::vector<Shard> shards;
  std::int64_t rows = 0;

  // Least recently used blocks at the back.
  std::list<Block> blocks;
  std::unordered_map<std::uint64_t, std::list<Block>::iterator> block_of_key;
  std::size_t open_files = 0;

  void verify(Shard& shard) const {
    if (shard.verified) return;
    const std::string path = (std::filesystem::path(folder) / shard.file.name).string();
    const std::string found = digest_file(path);
    CRAM_CHECK(found == shard.file.digest, ExitCode::kData, "the shard ", path, " is damaged: expected digest ",
               shard.file.digest, ", found ", found,
               ". Prepare the data again, or train without it: ", "data.on_bad_shard=skip");
    shard.verified = true;
  }

  ShardReader& reader(Shard& shard) {
    if (!shard.reader) {
      verify(shard);
      if (open_files >= kOpenFilesLimit) {
        for (Shard& other : shards) other.reader.reset();
        open_files = 0;
      }
      shard.reader = ShardReader::open(std::filesystem::path(folder) / shard.file.name);
      ++open_files;
    }
    return *shard.reader;
  }

  /// The block with this shard's rows [block*512, ...), read when it is not cached.
  const std::vector<std::uint32_t>& block(std::size_t shard_index, std::int64_t block_index) {
    const std::uint64_t key = static_cast<std::uint64_t>(shard_index) << 32U | static_cast<std::uint64_t>(block_index);
    if (const auto found = block_of_key.find(key); found != block_of_key.end()) {
      blocks.splice(blocks.begin(), blocks, found->second);
      return blocks.front().ids;
    }
    Shard& shard = shards[shard_index];
    const std::int64_t first = block_index * kShardBlockRows;
    const std::int64_t count = std::min(kShardBlockRows, shard.file.rows - first);
    Block fresh{key, std::vector<std::uint32_t>(static_cast<std::size_t>(count * manifest.seq_length))};
    reader(shard).read(first, count, fresh.ids.data());
    const std::size_t block_bytes =
        static_cast<std::size_t>(kShardBlockRows * manifest.seq_length) * sizeof(std::uint32_t);
    while (!blocks.empty() && (blocks.size() + 1) * block_bytes > kCacheBytes) {
      block_of_key.erase(blocks.back().key);
      blocks.pop_back();
    }
    blocks.push_front(std::move(fresh));
    block_of_key[key] = blocks.begin();
    return blocks.front().ids;
  }

  std::size_t shard_of_row(std::int64_t row) const {
    const auto after = std::upper_bound(shards.begin(), shards.end(), row,
                                        [](std::int64_t r, const Shard& shard) { return r < shard.first_row; });
    return static_cast<std::size_t>(after - shards.begin()) - 1;
  }
};

ShardSet::ShardSet(std::unique_ptr<State> state) noexcept : state_(std::move(state)) {}
ShardSet::ShardSet(ShardSet&&) noexcept = default;
ShardSet& ShardSet::operator=(ShardSet&&) noexcept = default;
ShardSet::~ShardSet() = default;

ShardSet ShardSet::of(const std::string& folder, const std::string& split, Manifest manifest,
                      const std::vector<Damage>& damage, bool verified) {
  auto state = std::make_unique<State>();
  state->folder = folder;
  state->split = split;
  state->manifest = std::move(manifest);
  for (const ShardFile& file : state->manifest.splits.at(split).shards) {
    const auto bad =
        std::find_if(damage.begin(), damage.end(), [&](const Damage& found) { return found.shard == file.name; });
    if (bad != damage.end()) {
      log_warning("leaving out ", file.name, " (", file.rows * state->manifest.seq_length, " tokens): ", bad->message);
      continue;
    }
    state->shards.push_back({file, state->rows, verified, std::nullopt});
    state->rows += file.rows;
  }
  CRAM_CHECK(state->rows > 0, ExitCode::kData, "the ", split, " split of ", folder,
             " has no rows: prepare a larger corpus, or change `cram_data pack --validation`");
  return ShardSet(std::move(state));
}

ShardSet ShardSet::open(const std::string& folder, const std::string& split, const ShardSetOptions& options) {
  Manifest manifest = read_prepared(folder, split);
  const std::vector<Damage> damage = find_damage(folder, manifest, options.reads_all());
  refuse(folder, damage, options);
  return of(folder, split, std::move(manifest), damage, options.reads_all());
}

PreparedShards open_prepared(const std::string& folder, const ShardSetOptions& options, const SharedCheck& check) {
  const Manifest manifest = read_prepared(folder, "train");
  (void)read_prepared(folder, "validation");
  const std::vector<Damage> own = find_damage(folder, manifest, options.reads_all(), {check.part, check.parts});
  const std::vector<Damage> damage = damage_from(check.exchange(to_text(own)));
  refuse(folder, damage, options);
  return {ShardSet::of(folder, "train", manifest, damage, options.reads_all()),
          ShardSet::of(folder, "validation", manifest, damage, options.reads_all())};
}

std::int64_t ShardSet::rows() const { return state_->rows; }
std::int64_t ShardSet::seq_length() const { return state_->manifest.seq_length; }
std::int64_t ShardSet::vocab_size() const { return state_->manifest.tokenizer.vocab_size; }
const std::string& ShardSet::tokenizer_digest() const { return state_->manifest.tokenizer.digest; }
const std::string& ShardSet::order() const { return state_->manifest.order; }
const std::string& ShardSet::folder() const { return state_->folder; }

std::string ShardSet::digest() const {
  std::string identity = state_->split + "\n" + tokenizer_digest() + "\n";
  for (const State::Shard& shard : state_->shards) identity += shard.file.digest + "\n";
  return digest_text(identity);
}

void ShardSet::read_rows(std::int64_t first, std::int64_t count, std::uint32_t* out) {
  State& s = *state_;
  CRAM_CHECK(first >= 0 && count >= 0 && first + count <= s.rows, ExitCode::kData, "rows [", first, ", ", first + count,
             ") asked of a split with ", s.rows);
  const std::int64_t seq_length = s.manifest.seq_length;
  while (count > 0) {
    const std::size_t shard_index = s.shard_of_row(first);
    const std::int64_t row = first - s.shards[shard_index].first_row;
    const std::vector<std::uint32_t>& ids = s.block(shard_index, row / kShardBlockRows);
    const std::int64_t row_in_block = row % kShardBlockRows;
    const std::int64_t block_rows = static_cast<std::int64_t>(ids.size()) / seq_length;
    const std::int64_t taken = std::min(count, block_rows - row_in_block);
    std::copy_n(ids.begin() + row_in_block * seq_length, taken * seq_length, out);
    out += taken * seq_length;
    first += taken;
    count -= taken;
  }
}

double unigram_loss(ShardSet& train, ShardSet& validation) {
  CRAM_CHECK(train.tokenizer_digest() == validation.tokenizer_digest(), ExitCode::kData,
             "the two splits have different tokenizers: ", train.tokenizer_digest(), " and ",
             validation.tokenizer_digest());
  const auto count_tokens = [](ShardSet& shards) {
    std::vector<std::int64_t> counts(static_cast<std::size_t>(shards.vocab_size()));
    std::vector<std::uint32_t> block(static_cast<std::size_t>(kShardBlockRows * shards.seq_length()));
    for (std::int64_t first = 0; first < shards.rows(); first += kShardBlockRows) {
      const std::int64_t rows = std::min(kShardBlockRows, shards.rows() - first);
      shards.read_rows(first, rows, block.data());
      for (std::int64_t i = 0; i < rows * shards.seq_length(); ++i) ++counts[block[static_cast<std::size_t>(i)]];
    }
    return counts;
  };
  const std::vector<std::int64_t> seen = count_tokens(train);
  const std::vector<std::int64_t> held_out = count_tokens(validation);
  const double total = static_cast<double>(train.rows() * train.seq_length()) + static_cast<double>(train.vocab_size());
  double nats = 0;
  for (std::size_t id = 0; id < seen.size(); ++id) {
    nats -= static_cast<double>(held_out[id]) * std::log((static_cast<double>(seen[id]) + 1.0) / total);
  }
  return nats / static_cast<double>(validation.rows() * validation.seq_length());
}

}  // namespace cram
