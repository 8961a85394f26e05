#include "data/loader.h"

#include <torch/types.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"
#include "data/sampler.h"

namespace cram {
namespace {

/// Collects masked rows into the tensors of one batch.
class BatchBuilder {
 public:
  BatchBuilder(const MaskSettings& settings, std::int64_t rows, bool pin_memory)
      : settings_(settings),
        per_row_(masked_per_row(settings)),
        row_(static_cast<std::size_t>(settings.seq_length)),
        pin_memory_(pin_memory),
        ids_(at::empty({rows, settings.seq_length}, at::kLong)),
        labels_(at::empty({rows * per_row_}, at::kLong)),
        positions_(at::empty({rows * per_row_}, at::kLong)) {}

  void add(ShardSet& shards, const SampleId& sample) {
    const std::int64_t s = settings_.seq_length;
    shards.read_rows(sample.row, 1, row_.data());
    std::int64_t* positions = positions_.mutable_data_ptr<std::int64_t>() + added_ * per_row_;
    std::int64_t* labels = labels_.mutable_data_ptr<std::int64_t>() + added_ * per_row_;
    mask_row(settings_, sample.epoch, sample.row, row_.data(), positions, labels);
    for (std::int64_t i = 0; i < per_row_; ++i) positions[i] += added_ * s;
    std::int64_t* ids = ids_.mutable_data_ptr<std::int64_t>() + added_ * s;
    for (std::size_t i = 0; i < row_.size(); ++i) ids[i] = static_cast<std::int64_t>(row_[i]);
    ++added_;
  }

  [[nodiscard]] Batch take() const {
    const Batch batch(ids_.size(0), settings_.seq_length,
                      {{std::string(field::kIds), ids_},
                       {std::string(field::kLabels), labels_},
                       {std::string(field::kPositions), positions_}});
    return pin_memory_ ? batch.map([](const at::Tensor& x) { return x.pin_memory(); }) : batch;
  }

 private:
  MaskSettings settings_;
  std::int64_t per_row_;
  std::vector<std::uint32_t> row_;  // [S]
  bool pin_memory_;
  at::Tensor ids_, labels_, positions_;
  std::int64_t added_ = 0;
};

MaskSettings mask_settings(const ShardSet& shards, const LoaderSettings& settings) {
  return {settings.seed, shards.vocab_size(), shards.seq_length(), settings.mask_rate};
}

}  // namespace

struct Loader::State {
  State(std::shared_ptr<ShardSet> shard_set, const LoaderSettings& loader_settings, std::int64_t first)
      : shards(std::move(shard_set)),
        settings(loader_settings),
        masks(mask_settings(*shards, loader_settings)),
        first_sample(first),
        sampler(shards->rows(), loader_settings.seed, loader_settings.shuffle) {}

  Batch make(std::int64_t step) {
    BatchBuilder builder(masks, settings.micro_batch, settings.pin_memory);
    const std::int64_t first = first_sample + (step * settings.dp_size + settings.dp_rank) * settings.micro_batch;
    for (std::int64_t i = 0; i < settings.micro_batch; ++i) builder.add(*shards, sampler.at(first + i));
    return builder.take();
  }

  void run() noexcept {
    for (std::int64_t step = 0;; ++step) {
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return stopping || ready.size() < static_cast<std::size_t>(settings.prefetch); });
        if (stopping) return;
      }
      try {
        Batch batch = make(step);
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
  MaskSettings masks;
  std::int64_t first_sample;
  Sampler sampler;             // the reader thread's own, like `shards`, while it lives
  std::int64_t next_step = 0;  // prefetch 0 only

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Batch> ready;   // guarded by mutex
  std::exception_ptr error;  // written once, by the reader thread under the mutex
  bool stopping = false;     // guarded by mutex
  std::thread reader;
};

Loader::Loader(std::shared_ptr<ShardSet> shards, const LoaderSettings& settings, std::int64_t first_sample) {
  CRAM_CHECK(settings.micro_batch > 0 && settings.dp_size > 0 && settings.dp_rank >= 0 &&
                 settings.dp_rank < settings.dp_size && settings.prefetch >= 0 && first_sample >= 0,
             ExitCode::kUsage, "the loader needs micro_batch > 0 and 0 <= dp_rank < dp_size, got micro_batch ",
             settings.micro_batch, ", dp_rank ", settings.dp_rank, ", dp_size ", settings.dp_size, ", prefetch ",
             settings.prefetch, ", first sample ", first_sample);
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

Batch Loader::next() {
  State& s = *state_;
  if (s.settings.prefetch == 0) return s.make(s.next_step++);
  Batch batch;
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

Batch make_batch(ShardSet& shards, std::int64_t first_row, std::int64_t rows, const MaskSettings& settings,
                 std::int64_t epoch) {
  BatchBuilder builder(settings, rows, /*pin_memory=*/false);
  for (std::int64_t i = 0; i < rows; ++i) builder.add(shards, {epoch, first_row + i});
  return builder.take();
}

}  // namespace cram
