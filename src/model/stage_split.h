// How the encoder's layers are dealt out to pipeline blocks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace cram {

/// A contiguous part of the encoder: layers [first_layer, end_layer), with the embedding before or the head after them.
struct BlockRange {
  std::int64_t first_layer = 0;
  std::int64_t end_layer = 0;
  bool embedding = false;
  bool head = false;

  [[nodiscard]] std::int64_t layers() const { return end_layer - first_layer; }
  /// "embedding, layers 0-7", for messages.
  [[nodiscard]] std::string text() const;
};

/// `blocks` parts of at least one layer. A layer costs 1, norm and decoder cost the last block 1 more (crammed-bert:
/// 0.9); the largest cost is minimised, then the sum of squared layers; ties give earlier blocks more (30 layers on 4:
/// 8, 8, 7, 7). A non-empty `chosen` ("8,8,8,6") overrides. Throws Error(kUsage) naming the numbers when that is
/// impossible.
[[nodiscard]] std::vector<BlockRange> split_layers(std::int64_t layers, std::int64_t blocks, const std::string& chosen);

}  // namespace cram
