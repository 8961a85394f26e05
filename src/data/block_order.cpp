#include "data/block_order.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "base/check.h"
#include "base/options.h"
#include "base/rng.h"
#include "base/special_tokens.h"

namespace cram {
namespace {

std::vector<double> log2_probabilities(const IdVector& ids, std::int64_t tokens, std::int64_t vocab_size) {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(vocab_size));
  for (std::int64_t i = 0; i < tokens; ++i) ++counts[ids[i]];
  std::vector<double> result;
  result.reserve(counts.size());
  const double total = static_cast<double>(tokens) + static_cast<double>(vocab_size);
  for (const std::int64_t count : counts) result.push_back(std::log2((static_cast<double>(count) + 1.0) / total));
  return result;
}

/// Ascending by the sum over a block of what each id contributes; stable.
template <class Value>
std::vector<std::uint64_t> ascending(const IdVector& ids, std::int64_t blocks, std::int64_t seq_length,
                                     const std::vector<Value>& value_of_id) {
  std::vector<Value> sums(static_cast<std::size_t>(blocks));
  for (std::int64_t block = 0; block < blocks; ++block) {
    Value sum = 0;
    for (std::int64_t i = block * seq_length; i < (block + 1) * seq_length; ++i) sum += value_of_id[ids[i]];
    sums[static_cast<std::size_t>(block)] = sum;
  }
  std::vector<std::uint64_t> order(sums.size());
  std::iota(order.begin(), order.end(), std::uint64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::uint64_t a, std::uint64_t b) { return sums[a] < sums[b]; });
  return order;
}

}  // namespace

const std::vector<std::string>& block_order_names() {
  static const std::vector<std::string> names{"none", "randomized", "sentence-length", "unigram", "fragment"};
  return names;
}

std::vector<std::uint64_t> order_blocks(const std::string& name, const IdVector& ids,
                                        const BlockOrderContext& context) {
  const std::int64_t blocks = ids.size() / context.seq_length;
  const auto vocabulary = static_cast<std::size_t>(context.vocab_size);
  if (name == "none") {
    std::vector<std::uint64_t> order(static_cast<std::size_t>(blocks));
    std::iota(order.begin(), order.end(), std::uint64_t{0});
    return order;
  }
  if (name == "randomized") {
    return random_permutation(static_cast<std::uint64_t>(blocks), stream_key(context.seed, "block order"));
  }
  if (name == "unigram") {  // every block has S tokens, so the sum orders as the mean does
    return ascending(ids, blocks, context.seq_length,
                     log2_probabilities(ids, blocks * context.seq_length, context.vocab_size));
  }
  std::vector<std::int64_t> negative_count(vocabulary);
  if (name == "sentence-length") {
    std::transform(context.full_stops.begin(), context.full_stops.end(), negative_count.begin(), std::negate<>());
  } else if (name == "fragment") {
    negative_count[kSepId] = -1;
  } else {
    fail(ExitCode::kUsage, "unknown order '", name, "', nearest: ", nearest_name(name, block_order_names()));
  }
  return ascending(ids, blocks, context.seq_length, negative_count);
}

}  // namespace cram
