#include "data/inspect.h"

#include <algorithm>
#include <vector>

#include "base/check.h"
#include "base/log.h"
#include "base/rng.h"
#include "data/account.h"
#include "data/manifest.h"
#include "data/masking.h"
#include "data/shard_set.h"
#include "data/tokenizer.h"

namespace cram {
namespace {

void print_pieces(const Tokenizer& tokenizer, std::int64_t samples) {
  const std::int64_t size = tokenizer.vocab_size();
  for (std::int64_t i = 0; i < samples; ++i) {
    const auto id = static_cast<std::uint32_t>(i * (size - 1) / std::max<std::int64_t>(1, samples - 1));
    say(id, "\t", tokenizer.piece(id));
  }
}

void print_row(ShardSet& shards, const Tokenizer& tokenizer, std::int64_t row, const InspectSettings& settings) {
  std::vector<std::uint32_t> ids(static_cast<std::size_t>(shards.seq_length()));
  shards.read_rows(row, 1, ids.data());
  say("row ", row, ": ", tokenizer.decode(ids));
  if (!settings.masked) return;
  const MaskSettings masks{settings.seed, shards.vocab_size(), shards.seq_length(), settings.mask_rate};
  const auto n = static_cast<std::size_t>(masked_per_row(masks));
  std::vector<std::int64_t> positions(n);
  std::vector<std::int64_t> labels(n);
  mask_row(masks, /*epoch=*/0, row, ids.data(), positions.data(), labels.data());
  say("  masked: ", tokenizer.decode(ids));
  std::string answers;
  std::size_t replaced = 0;
  std::size_t kept = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t shown = ids[static_cast<std::size_t>(positions[i])];
    const bool same = static_cast<std::int64_t>(shown) == labels[i];
    if (same) ++kept;
    if (!same && shown != kMaskId) ++replaced;
    answers += concat(i == 0 ? "" : ", ", positions[i], "=", tokenizer.piece(static_cast<std::uint32_t>(labels[i])));
    if (same) answers += " (shown)";
    if (!same && shown != kMaskId) answers += concat(" (as ", tokenizer.piece(shown), ")");
  }
  say("  ", n, " positions: ", n - replaced - kept, " masked, ", replaced, " replaced, ", kept, " shown: ", answers);
}

}  // namespace

void verify_folder(const std::string& folder) {
  const Manifest manifest = read_manifest(folder);
  std::vector<Damage> faults = find_damage(folder, manifest, /*digests=*/true);
  if (faults.empty()) {
    try {
      const Tokenizer tokenizer = Tokenizer::load(folder);
      CRAM_CHECK(tokenizer.vocab_size() == manifest.tokenizer.vocab_size, ExitCode::kData, "the tokenizer has ",
                 tokenizer.vocab_size(), " entries, the manifest says ", manifest.tokenizer.vocab_size);
      for (const auto& [name, split] : manifest.splits) {
        ShardSet shards = ShardSet::open(folder, name);
        std::vector<std::uint32_t> block(static_cast<std::size_t>(kShardBlockRows * shards.seq_length()));
        for (std::int64_t first = 0; first < shards.rows(); first += kShardBlockRows) {
          shards.read_rows(first, std::min(kShardBlockRows, shards.rows() - first), block.data());
        }
        say(name, ": ", with_commas(split.rows), " rows in ", split.shards.size(), " shards are good");
      }
    } catch (const Error& error) {
      faults.push_back({"", error.what()});
    }
  }
  if (faults.empty()) return say(folder, " is whole (", manifest.kind, ", tokenizer ", manifest.tokenizer.digest, ")");
  std::string list;
  for (const Damage& fault : faults) list += "\n  " + fault.message;
  fail(ExitCode::kData, folder, " is damaged:", list, "\nMake it again with --force, or copy it again");
}

void inspect_folder(const InspectSettings& settings) {
  CRAM_CHECK(settings.samples >= 0, ExitCode::kUsage, "--samples must not be negative, got ", settings.samples);
  CRAM_CHECK(settings.split == "train" || settings.split == "validation", ExitCode::kUsage, "--split ", settings.split,
             " is unknown, expected train or validation");
  const Manifest manifest = read_manifest(settings.folder);
  const Tokenizer tokenizer = Tokenizer::load(settings.folder);
  say(settings.folder, ": ", manifest.kind, "; ", manifest.tokenizer.type, " tokenizer of ",
      with_commas(manifest.tokenizer.vocab_size), " entries, digest ", manifest.tokenizer.digest);
  for (const auto& [key, value] : manifest.settings) say("  ", key, " = ", value);
  for (const auto& [key, value] : manifest.counts) say("  ", key, ": ", with_commas(value));
  if (manifest.kind == "tokenizer") return print_pieces(tokenizer, settings.samples);
  for (const auto& [name, split] : manifest.splits) {
    say("  ", name, ": ", with_commas(split.rows), " rows of ", manifest.seq_length, " from ",
        with_commas(split.documents), " documents, ", split.dropped_tokens, " tokens dropped at the end");
  }
  ShardSet shards = ShardSet::open(settings.folder, settings.split);
  CRAM_CHECK(settings.samples <= shards.rows(), ExitCode::kUsage, "--samples ", settings.samples, ": the ",
             settings.split, " split has ", shards.rows(), " rows");
  RandomStream stream(stream_key(settings.seed, "inspect"));
  for (std::int64_t i = 0; i < settings.samples; ++i) {
    const auto row = static_cast<std::int64_t>(stream.below(static_cast<std::uint64_t>(shards.rows())));
    print_row(shards, tokenizer, row, settings);
  }
}

}  // namespace cram
