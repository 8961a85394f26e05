// `cram_data pack`: text and a tokenizer in, a prepared folder of shards out.
//
// Memory: the token ids of the whole corpus, twice for a moment (2 bytes a token each, 4 above 65,536 entries), and 40
// bytes a document; the text itself only in batches of a few megabytes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace cram {

struct PackSettings {
  std::vector<std::string> inputs;
  std::string tokenizer;  ///< folder of `cram_data tokenizer`, or a prepared folder
  std::string output;
  std::int64_t seq_length = 128;     ///< S
  std::optional<double> filter;      ///< keep a document when ids < filter × code points; none: keep all
  std::string order = "randomized";  ///< of the training blocks, see block_order.h
  double validation = 0.01;          ///< share of the documents held out, chosen by their content
  std::uint64_t seed = 0;            ///< of document and block order; the split does not depend on it
  std::int64_t rows_per_shard = 262144;
  int threads = 1;     ///< they do not change the result
  bool force = false;  ///< replace an output that was made from something else
};

/// Is a document held out? A function of its normalised text and the share alone, so that a document never changes
/// sides when others come, and a larger share keeps what a smaller one held out.
[[nodiscard]] bool is_validation_document(std::uint64_t content_hash, double share);

/// Prepares the folder, or says that it already holds this. Error(kData) when a side has less than one block.
void pack(const PackSettings& settings);

}  // namespace cram
