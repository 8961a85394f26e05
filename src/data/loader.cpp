#include "data/loader.h"

#include <torch/types.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"

namespace cram {
namespace {

MaskSettings mask_settings(const ShardSet& shards, const LoaderSettings& settings) {
  return {settings.seed, shards.vocab_size(), shards.seq_length(), settings.mask_rate};
}

at::Tensor read_samples(ShardSet& shards, const std::vector<SampleId>& samples) {
  const std::int64_t s = shards.seq_length();
  at::Tensor ids = at::empty({static_cast<std::int64_t>(samples.size()), s}, at::kInt);
  auto* out = reinterpret_cast<std::uint32_t*>(ids.mutable_data_ptr<std::int32_t>());
  for (std::size_t i = 0; i < samples.size(); ++i) {
    shards.read_rows(samples[i].row, 1, out + static_cast<std::int64_t>(i) * s);
  }
  return ids;
}

}  // namespace

Batch masked_batch(const std::vector<SampleId>& samples, const at::Tensor& ids, const MaskSettings& settings) {
  const std::int64_t s = settings.seq_length, per_row = masked_per_row(settings);
  const auto rows = static_cast<std::int64_t>(samples.size());
  CRAM_DCHECK(ids.scalar_type() == at::kInt && ids.is_contiguous() && ids.numel() == rows * s);
  const at::Tensor shown = at::empty({rows, s}, at::kLong);
  const at::Tensor labels = at::empty({rows * per_row}, at::kLong), positions = at::empty_like(labels);
  std::vector<std::uint32_t> row(static_cast<std::size_t>(s));
  for (std::int64_t r = 0; r < rows; ++r) {
    const auto* from = reinterpret_cast<const std::uint32_t*>(ids.const_data_ptr<std::int32_t>()) + r * s;
    std::copy(from, from + s, row.begin());
    std::int64_t* where = positions.mutable_data_ptr<std::int64_t>() + r * per_row;
    const SampleId& sample = samples[static_cast<std::size_t>(r)];
    mask_row(settings, sample.epoch, sample.row, row.data(), where,
             labels.mutable_data_ptr<std::int64_t>() + r * per_row);
    for (std::int64_t i = 0; i < per_row; ++i) where[i] += r * s;
    std::copy(row.begin(), row.end(), shown.mutable_data_ptr<std::int64_t>() + r * s);
  }
  return Batch(rows, s,
               {{std::string(field::kIds), shown},
                {std::string(field::kLabels), labels},
                {std::string(field::kPositions), positions}});
}

RowStream::RowStream(const ShardSet& shards, const LoaderSettings& settings, std::int64_t first_sample)
    : settings_(settings),
      masks_(mask_settings(shards, settings)),
      first_sample_(first_sample),
      sampler_(shards.rows(), settings.seed, settings.shuffle) {
  CRAM_CHECK(settings.micro_batch > 0 && settings.dp_size > 0 && settings.dp_rank >= 0 &&
                 settings.dp_rank < settings.dp_size && settings.prefetch >= 0 && first_sample >= 0,
             ExitCode::kUsage, "the loader needs micro_batch > 0 and 0 <= dp_rank < dp_size, got micro_batch ",
             settings.micro_batch, ", dp_rank ", settings.dp_rank, ", dp_size ", settings.dp_size, ", prefetch ",
             settings.prefetch, ", first sample ", first_sample);
}

std::vector<SampleId> RowStream::samples(std::int64_t step) {
  const std::int64_t first = first_sample_ + (step * settings_.dp_size + settings_.dp_rank) * settings_.micro_batch;
  std::vector<SampleId> samples;
  for (std::int64_t i = 0; i < settings_.micro_batch; ++i) samples.push_back(sampler_.at(first + i));
  return samples;
}

Batch RowStream::batch(const std::vector<SampleId>& samples, const at::Tensor& ids) const {
  const Batch made = masked_batch(samples, ids, masks_);
  return settings_.pin_memory ? made.map([](const at::Tensor& x) { return x.pin_memory(); }) : made;
}

struct Loader::State {
  State(std::shared_ptr<ShardSet> shard_set, const LoaderSettings& loader_settings, std::int64_t first_sample)
      : shards(std::move(shard_set)), settings(loader_settings), stream(*shards, loader_settings, first_sample) {}

  Loaded make(std::int64_t step) {
    const std::vector<SampleId> samples = stream.samples(step);
    at::Tensor ids = read_samples(*shards, samples);
    return {stream.batch(samples, ids), ids};
  }

  void run() noexcept {
    for (std::int64_t step = 0;; ++step) {
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return stopping || ready.size() < static_cast<std::size_t>(settings.prefetch); });
        if (stopping) return;
      }
      try {
        Loaded batch = make(step);
        const std::lock_guard lock(mutex);
        ready.push_back(std::move(batch));
      } catch (...) {
        const std::lock_guard lock(mutex);
        error = std::current_exception();
      }
      changed.notify_all();
      if (error) return;
    }
  }

  std::shared_ptr<ShardSet> shards;
  LoaderSettings settings;
  RowStream stream;            // the reader thread's own, like `shards`, while it lives
  std::int64_t next_step = 0;  // prefetch 0 only

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Loaded> ready;  // guarded by mutex
  std::exception_ptr error;  // written once, by the reader thread under the mutex
  bool stopping = false;     // guarded by mutex
  std::thread reader;
};

Loader::Loader(std::shared_ptr<ShardSet> shards, const LoaderSettings& settings, std::int64_t first_sample) {
  state_ = std::make_unique<State>(std::move(shards), settings, first_sample);
  if (settings.prefetch > 0) state_->reader = std::thread([state = state_.get()] { state->run(); });
}

Loader::~Loader() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
  }
  state_->changed.notify_all();
  if (state_->reader.joinable()) state_->reader.join();
}

Loader::Loaded Loader::take() {
  State& s = *state_;
  if (s.settings.prefetch == 0) return s.make(s.next_step++);
  Loaded batch;
  {
    std::unique_lock lock(s.mutex);
    s.changed.wait(lock, [&] { return !s.ready.empty() || s.error; });
    // What was read before the fault is still good and comes first.
    if (s.ready.empty()) std::rethrow_exception(s.error);
    batch = std::move(s.ready.front());
    s.ready.pop_front();
  }
  s.changed.notify_all();
  return batch;
}

std::vector<SampleId> consecutive_samples(std::int64_t epoch, std::int64_t first_row, std::int64_t rows) {
  std::vector<SampleId> samples;
  for (std::int64_t i = 0; i < rows; ++i) samples.push_back({epoch, first_row + i});
  return samples;
}

at::Tensor read_ids(ShardSet& shards, std::int64_t first_row, std::int64_t rows) {
  at::Tensor ids = at::empty({rows, shards.seq_length()}, at::kInt);
  shards.read_rows(first_row, rows, reinterpret_cast<std::uint32_t*>(ids.mutable_data_ptr<std::int32_t>()));
  return ids;
}

Batch make_batch(ShardSet& shards, std::int64_t first_row, std::int64_t rows, const MaskSettings& settings,
                 std::int64_t epoch) {
  return masked_batch(consecutive_samples(epoch, first_row, rows), read_ids(shards, first_row, rows), settings);
}

}  // namespace cram
