#include "data/pack.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <memory>
#include <mutex>
#include <utility>

#include "base/check.h"
#include "base/digest.h"
#include "base/file_io.h"
#include "base/log.h"
#include "base/options.h"
#include "base/rng.h"
#include "data/account.h"
#include "data/block_order.h"
#include "data/documents.h"
#include "data/id_vector.h"
#include "data/manifest.h"
#include "data/shard.h"
#include "data/tokenizer.h"

namespace cram {
namespace {

constexpr std::uint64_t kContentHashSeed = 0x63726D6461746131ULL;  // "crmdata1": the split's own, never the run's

struct PackedDocument {
  std::int64_t first = 0;  ///< into Corpus::ids
  std::int64_t count = 0;  ///< with its separator
  std::uint64_t content_hash = 0;
};

struct Corpus {
  explicit Corpus(std::int64_t vocab_size) : ids(vocab_size) {}
  IdVector ids;
  std::vector<PackedDocument> documents;  ///< in input order
  std::int64_t unknown_tokens = 0;
  std::int64_t code_points = 0;
};

double unit(std::uint64_t hash) { return static_cast<double>(hash >> 11U) * 0x1p-53; }

std::uint64_t content_hash(const std::string& normalized) { return hash64(normalized, kContentHashSeed); }

/// Encoders with their memories, lent to whichever thread works.
class EncoderPool {
 public:
  explicit EncoderPool(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

  class Lease {
   public:
    explicit Lease(EncoderPool& pool) : pool_(pool) {
      const std::lock_guard lock(pool.mutex_);
      if (pool.idle_.empty()) {
        encoder_ = std::make_unique<CachingEncoder>(pool.tokenizer_);
      } else {
        encoder_ = std::move(pool.idle_.back());
        pool.idle_.pop_back();
      }
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    ~Lease() {
      const std::lock_guard lock(pool_.mutex_);
      pool_.idle_.push_back(std::move(encoder_));
    }
    [[nodiscard]] CachingEncoder* operator->() const { return encoder_.get(); }

   private:
    EncoderPool& pool_;
    std::unique_ptr<CachingEncoder> encoder_;
  };

 private:
  const Tokenizer& tokenizer_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<CachingEncoder>> idle_;
};

/// The smallest share, rounded up to something a person would type, that leaves a block on both sides; 0 when none.
double fitting_share(const Corpus& corpus, std::int64_t seq_length) {
  std::vector<std::pair<double, std::int64_t>> by_hash;
  for (const PackedDocument& d : corpus.documents) by_hash.emplace_back(unit(d.content_hash), d.count);
  std::sort(by_hash.begin(), by_hash.end());
  const auto held_out = [&](double share) {
    std::int64_t tokens = 0;
    for (const auto& [position, count] : by_hash) tokens += position < share ? count : 0;
    return tokens;
  };
  std::int64_t tokens = 0;
  for (const auto& [position, count] : by_hash) {
    tokens += count;
    if (tokens < seq_length) continue;
    for (const double places : {1e2, 1e3, 1e4, 1e6}) {
      const double share = (std::floor(position * places) + 1.0) / places;
      const std::int64_t validation = held_out(share);
      if (share < 1.0 && validation >= seq_length && corpus.ids.size() - validation >= seq_length) return share;
    }
    return 0;
  }
  return 0;
}

[[noreturn]] void refuse_split(const Corpus& corpus, const PackSettings& settings, std::int64_t train_tokens,
                               std::int64_t validation_tokens) {
  const std::int64_t needed = settings.seq_length;
  const double share = fitting_share(corpus, needed);
  std::string advice;
  if (share > 0) {
    advice = concat("--validation ", format_double(share), " fits this text");
  } else {
    advice = concat(
        "no --validation fits this text (identical documents stay on one side): add other text, split it into more "
        "different documents (blank lines), or choose a smaller --seq-length");
  }
  fail(ExitCode::kData, "too little text: ", corpus.ids.size(), " tokens in ", corpus.documents.size(),
       " documents give ", train_tokens, " for training and ", validation_tokens, " for validation with --validation ",
       format_double(settings.validation), "; each side needs at least ", needed, " (one block of --seq-length); ",
       advice);
}

/// The documents of one side, in packing order, as one stream of whole blocks.
struct Stream {
  explicit Stream(std::int64_t vocab_size) : ids(vocab_size) {}
  IdVector ids;
  std::int64_t documents = 0;
  std::int64_t dropped_tokens = 0;
};

Stream make_stream(const Corpus& corpus, std::vector<const PackedDocument*> documents, const PackSettings& settings,
                   std::int64_t vocab_size) {
  if (settings.order != "none") {
    // By a keyed hash of the content: the order of files and folders does not matter, only the text does.
    const std::uint64_t key = stream_key(settings.seed, "document order");
    const auto rank = [&](const PackedDocument* d) { return philox(key, d->content_hash); };
    std::stable_sort(documents.begin(), documents.end(),
                     [&](const PackedDocument* a, const PackedDocument* b) { return rank(a) < rank(b); });
  }
  std::int64_t tokens = 0;
  for (const PackedDocument* d : documents) tokens += d->count;
  Stream stream(vocab_size);
  stream.documents = static_cast<std::int64_t>(documents.size());
  stream.dropped_tokens = tokens % settings.seq_length;
  stream.ids.reserve(tokens);
  for (const PackedDocument* d : documents) {
    for (std::int64_t i = d->first; i < d->first + d->count; ++i) stream.ids.push_back(corpus.ids[i]);
  }
  return stream;
}

std::vector<std::int64_t> full_stops_of(const Tokenizer& tokenizer) {
  std::vector<std::int64_t> counts;
  for (std::uint32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    const std::string& piece = tokenizer.piece(id);
    counts.push_back(id < kSpecialTokens ? 0 : std::count(piece.begin(), piece.end(), '.'));
  }
  return counts;
}

std::string shard_name(const std::string& split, std::int64_t index) {
  std::string digits = std::to_string(index);
  if (digits.size() < 5) digits.insert(0, 5 - digits.size(), '0');
  return split + "-" + digits + ".h5";
}

SplitRecord write_split(const std::string& split, const Stream& stream, const std::vector<std::uint64_t>& order,
                        const PackSettings& settings, const Tokenizer& tokenizer) {
  const std::int64_t s = settings.seq_length;
  SplitRecord record;
  record.rows = static_cast<std::int64_t>(order.size());
  record.documents = stream.documents;
  record.dropped_tokens = stream.dropped_tokens;
  for (std::int64_t first = 0; first < record.rows; first += settings.rows_per_shard) {
    const auto index = static_cast<std::int64_t>(record.shards.size());
    const ShardHeader header{s,
                             tokenizer.vocab_size(),
                             std::min(settings.rows_per_shard, record.rows - first),
                             index,
                             split,
                             settings.order,
                             tokenizer.digest()};
    const auto fill = [&](std::int64_t row, std::int64_t count, std::uint32_t* out) {
      for (std::int64_t i = 0; i < count; ++i) {
        const auto block = static_cast<std::int64_t>(order[static_cast<std::size_t>(first + row + i)]);
        for (std::int64_t j = 0; j < s; ++j) *out++ = stream.ids[block * s + j];
      }
    };
    record.shards.push_back(
        write_shard(std::filesystem::path(settings.output) / shard_name(split, index), header, fill));
  }
  return record;
}

void check_settings(const PackSettings& settings) {
  CRAM_CHECK(settings.seq_length >= 2 && settings.seq_length <= 65536, ExitCode::kUsage,
             "--seq-length must be in [2, 65536], got ", settings.seq_length);
  CRAM_CHECK(settings.validation > 0 && settings.validation < 1, ExitCode::kUsage,
             "--validation must be above 0 and below 1, got ", format_double(settings.validation));
  CRAM_CHECK(!settings.filter || (*settings.filter > 0 && *settings.filter <= 10), ExitCode::kUsage,
             "--filter must be in (0, 10] tokens a character, got ", format_double(settings.filter.value_or(0)));
  CRAM_CHECK(settings.rows_per_shard >= 1, ExitCode::kUsage, "--rows-per-shard must be at least 1, got ",
             settings.rows_per_shard);
  const auto& names = block_order_names();
  CRAM_CHECK(std::find(names.begin(), names.end(), settings.order) != names.end(), ExitCode::kUsage,
             "unknown --order '", settings.order, "', nearest: ", nearest_name(settings.order, names));
}

std::map<std::string, std::string> identity(const PackSettings& settings, const Tokenizer& tokenizer) {
  return {{"tokenizer", tokenizer.digest()},
          {"seq_length", std::to_string(settings.seq_length)},
          {"filter", settings.filter ? format_double(*settings.filter) : "off"},
          {"order", settings.order},
          {"validation", format_double(settings.validation)},
          {"seed", std::to_string(settings.seed)},
          {"rows_per_shard", std::to_string(settings.rows_per_shard)}};
}

/// Reads, normalises, encodes and filters everything; prints the accounts of the stages.
Corpus read_corpus(const InputList& inputs, const PackSettings& settings, const Tokenizer& tokenizer,
                   Manifest& manifest) {
  EncoderPool encoders(tokenizer);
  DocumentSource source(inputs);
  PreparedDocuments documents(source, settings.threads, "pack", [&](PreparedDocument& document) {
    const EncoderPool::Lease encoder(encoders);
    document.ids = encoder->encode_normalized(document.normalized);
  });
  Account filtered("filter");
  Corpus corpus(tokenizer.vocab_size());
  PreparedDocument document;
  while (documents.next(document)) {
    const auto tokens = static_cast<std::int64_t>(document.ids.size());
    filtered.take(document.raw_bytes, 1);
    if (settings.filter &&
        static_cast<double>(tokens) >= *settings.filter * static_cast<double>(document.code_points)) {
      filtered.drop("too many tokens a character", document.raw_bytes, 1);
      continue;
    }
    filtered.keep(document.raw_bytes, 1);
    corpus.documents.push_back({corpus.ids.size(), tokens + 1, content_hash(document.normalized)});
    corpus.code_points += document.code_points;
    for (const std::uint32_t id : document.ids) {
      corpus.unknown_tokens += id == kUnkId ? 1 : 0;
      corpus.ids.push_back(id);
    }
    corpus.ids.push_back(kSepId);
  }
  say(source.account().text());
  say(source.findings());
  say(documents.account().text());
  if (settings.filter) {
    say(filtered.text());
    if (2 * filtered.dropped().bytes > filtered.input().bytes) {
      log_warning("THE FILTER DROPPED MORE THAN HALF OF THE TEXT: ", with_commas(filtered.dropped().bytes), " of ",
                  with_commas(filtered.input().bytes), " bytes. A small vocabulary needs more tokens a character than ",
                  format_double(*settings.filter), ": raise --filter or leave it out");
    }
  }
  manifest.counts = {{"input_bytes", source.account().input().bytes},
                     {"input_documents", source.account().input().documents},
                     {"filtered_documents", filtered.dropped().documents},
                     {"filtered_bytes", filtered.dropped().bytes},
                     {"documents", filtered.kept().documents},
                     {"tokens", corpus.ids.size()},
                     {"unknown_tokens", corpus.unknown_tokens}};
  return corpus;
}

}  // namespace

bool is_validation_document(std::uint64_t content_hash, double share) { return unit(content_hash) < share; }

void pack(const PackSettings& settings) {
  check_settings(settings);
  const Tokenizer tokenizer = Tokenizer::load(settings.tokenizer);
  const InputList inputs = find_inputs(settings.inputs);
  Manifest manifest;
  manifest.kind = "shards";
  manifest.inputs_digest = inputs.digest;
  manifest.settings = identity(settings, tokenizer);
  if (is_already_made(settings.output, manifest, settings.force)) {
    const Manifest present = read_manifest(settings.output);
    say("already prepared: ", settings.output, " has this data, ", with_commas(present.splits.at("train").rows),
        " training and ", with_commas(present.splits.at("validation").rows), " validation rows of ", present.seq_length,
        " tokens from the same inputs");
    return;
  }
  say("packing ", inputs.files.size(), " files into rows of ", settings.seq_length, " tokens with a vocabulary of ",
      tokenizer.vocab_size());
  if (inputs.skipped_files > 0) {
    say("skipped ", inputs.skipped_files, " files that are no .txt or .jsonl (", inputs.first_skipped, " ...)");
  }

  const std::int64_t vocab_size = tokenizer.vocab_size();
  Stream train(vocab_size);
  Stream validation(vocab_size);
  {
    const Corpus corpus = read_corpus(inputs, settings, tokenizer, manifest);
    std::array<std::vector<const PackedDocument*>, 2> sides;
    std::array<std::int64_t, 2> tokens{};
    for (const PackedDocument& document : corpus.documents) {
      const std::size_t side = is_validation_document(document.content_hash, settings.validation) ? 1 : 0;
      sides[side].push_back(&document);
      tokens[side] += document.count;
    }
    if (std::min(tokens[0], tokens[1]) < settings.seq_length) refuse_split(corpus, settings, tokens[0], tokens[1]);
    train = make_stream(corpus, std::move(sides[0]), settings, vocab_size);
    validation = make_stream(corpus, std::move(sides[1]), settings, vocab_size);
    say("tokens: ", with_commas(corpus.ids.size()), " with separators (",
        format_double(std::round(1000.0 * static_cast<double>(corpus.ids.size()) /
                                 static_cast<double>(std::max<std::int64_t>(1, corpus.code_points))) /
                      1000.0),
        " a character, ", with_commas(corpus.unknown_tokens), " unknown)");
  }

  BlockOrderContext context{settings.seq_length, vocab_size, settings.seed, {}};
  if (settings.order == "sentence-length") context.full_stops = full_stops_of(tokenizer);
  const FolderLock lock =
      begin_folder(settings.output, manifest, settings.force);  // one writer until the manifest is there
  write_file_atomically(std::filesystem::path(settings.output) / kTokenizerFileName, tokenizer.bytes(),
                        ExitCode::kData);
  manifest.tokenizer = {vocab_size, tokenizer.type(), tokenizer.digest(), digest_text(tokenizer.bytes())};
  manifest.seq_length = settings.seq_length;
  manifest.order = settings.order;
  manifest.splits["train"] =
      write_split("train", train, order_blocks(settings.order, train.ids, context), settings, tokenizer);
  // Held-out rows stay as packed: evaluation reads the first ones, and a curriculum would make them special.
  manifest.splits["validation"] =
      write_split("validation", validation, order_blocks("none", validation.ids, context), settings, tokenizer);
  write_manifest(settings.output, manifest);
  for (const auto& [name, split] : manifest.splits) {
    say(name, ": ", with_commas(split.rows), " rows of ", settings.seq_length, " in ", split.shards.size(),
        " shards; tokens: input ", with_commas(split.rows * settings.seq_length + split.dropped_tokens), " = kept ",
        with_commas(split.rows * settings.seq_length), " + dropped ", with_commas(split.dropped_tokens),
        " (the last, short row); ", with_commas(split.documents), " documents");
  }
  say("wrote ", settings.output, " (order ", settings.order, ", tokenizer ", tokenizer.digest(), ")");
}

}  // namespace cram
