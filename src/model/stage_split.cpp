#include "model/stage_split.h"

#include <algorithm>

#include "base/check.h"
#include "base/options.h"

namespace cram {
namespace {

std::vector<std::int64_t> chosen_sizes(const std::string& chosen) {
  std::vector<std::int64_t> sizes;
  for (std::size_t begin = 0; begin <= chosen.size();) {
    const std::size_t comma = std::min(chosen.find(',', begin), chosen.size());
    sizes.push_back(parse_integer(chosen.substr(begin, comma - begin), "parallel.split"));
    begin = comma + 1;
  }
  return sizes;
}

// Equal numbers of layers, what is left over to the first ones. With floor(L/b) layers the last block costs
// floor(L/b) + 1, which no split can beat as the largest cost, and among those this one has the least sum of squared
// layers: a test tries all splits.
std::vector<std::int64_t> balanced_sizes(std::int64_t layers, std::int64_t blocks) {
  std::vector<std::int64_t> sizes;
  for (std::int64_t b = 0; b < blocks; ++b) sizes.push_back(layers / blocks + (b < layers % blocks ? 1 : 0));
  return sizes;
}

}  // namespace

std::string BlockRange::text() const {
  return concat(embedding ? "embedding, " : "",
                layers() == 1 ? concat("layer ", first_layer) : concat("layers ", first_layer, "-", end_layer - 1),
                head ? ", head" : "");
}

std::vector<BlockRange> split_layers(std::int64_t layers, std::int64_t blocks, const std::string& chosen) {
  CRAM_CHECK(layers >= blocks, ExitCode::kUsage, "model.layers=", layers, " cannot be split into ", blocks,
             " pipeline blocks (parallel.pipeline x parallel.virtual_stages) of at least one layer; legal: 1 to ",
             layers);
  const std::vector<std::int64_t> sizes = chosen.empty() ? balanced_sizes(layers, blocks) : chosen_sizes(chosen);
  std::int64_t sum = 0;
  for (const std::int64_t size : sizes) {
    CRAM_CHECK(size > 0, ExitCode::kUsage, "parallel.split=", chosen,
               ": every block needs at least one layer, as in 8,8,7,7");
    sum += size;
  }
  CRAM_CHECK(static_cast<std::int64_t>(sizes.size()) == blocks && sum == layers, ExitCode::kUsage,
             "parallel.split=", chosen, " has ", sizes.size(), " blocks with ", sum, " layers, expected ", blocks,
             " with ", layers);
  std::vector<BlockRange> ranges;
  std::int64_t first = 0;
  for (std::size_t b = 0; b < sizes.size(); ++b) {
    ranges.push_back({first, first + sizes[b], b == 0, b + 1 == sizes.size()});
    first += sizes[b];
  }
  return ranges;
}

}  // namespace cram
