#include "data/sampler.h"

#include "base/check.h"
#include "base/rng.h"

namespace cram {

Sampler::Sampler(std::int64_t rows, std::uint64_t seed, bool shuffle) : rows_(rows), seed_(seed), shuffle_(shuffle) {
  CRAM_CHECK(rows > 0, ExitCode::kData, "the split has no rows: prepare a larger corpus with `cram_data pack`");
}

SampleId Sampler::at(std::int64_t sample) {
  CRAM_CHECK(sample >= 0, ExitCode::kData, "a sample's number cannot be negative, got ", sample);
  const std::int64_t epoch = sample / rows_;
  const std::int64_t index = sample % rows_;
  if (!shuffle_) return {epoch, index};
  if (permuted_epoch_ != epoch) {
    permutation_ = random_permutation(static_cast<std::uint64_t>(rows_),
                                      stream_key(seed_, "shuffle", static_cast<std::uint64_t>(epoch)));
    permuted_epoch_ = epoch;
  }
  return {epoch, static_cast<std::int64_t>(permutation_[static_cast<std::size_t>(index)])};
}

}  // namespace cram
