#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "base/log.h"
#include "data/documents.h"

namespace cram {
namespace {

constexpr std::int64_t kBatchBytes = std::int64_t{8} << 20U;
constexpr auto kProgressInterval = std::chrono::seconds(5);

}  // namespace

struct PreparedDocuments::State {
  State(DocumentSource& document_source, int thread_count, std::string progress_label, Work document_work)
      : source(document_source),
        threads(thread_count),
        label(std::move(progress_label)),
        work(std::move(document_work)),
        last_progress(std::chrono::steady_clock::now()) {}

  DocumentSource& source;
  int threads;
  std::string label;
  Work work;
  Account account{"normalise"};
  std::vector<PreparedDocument> batch;
  std::size_t at = 0;
  std::chrono::steady_clock::time_point last_progress;

  bool refill() {
    std::vector<std::string> raw;
    batch.clear();
    at = 0;
    Document document;
    for (std::int64_t bytes = 0; bytes < kBatchBytes && source.next(document);) {
      bytes += static_cast<std::int64_t>(document.text.size());
      batch.push_back({"", static_cast<std::int64_t>(document.text.size()), document.code_points, {}});
      raw.push_back(std::move(document.text));
      document.text.clear();
    }
    run(raw);
    for (const PreparedDocument& done : batch) book(done);
    show_progress();
    return !batch.empty();
  }

  void run(const std::vector<std::string>& raw) {
    std::atomic<std::size_t> next{0};
    std::exception_ptr error;
    std::mutex error_mutex;
    const auto loop = [&] {
      try {
        for (std::size_t i = next++; i < raw.size(); i = next++) {
          batch[i].normalized = normalize(raw[i]);
          if (work && !batch[i].normalized.empty()) work(batch[i]);
        }
      } catch (...) {
        next = raw.size();
        const std::lock_guard lock(error_mutex);
        error = std::current_exception();
      }
    };
    std::vector<std::jthread> helpers;
    for (int i = 1; i < threads && static_cast<std::size_t>(i) < raw.size(); ++i) helpers.emplace_back(loop);
    loop();
    helpers.clear();  // joins
    if (error) std::rethrow_exception(error);
  }

  void book(const PreparedDocument& done) {
    const auto bytes = static_cast<std::int64_t>(done.normalized.size());
    account.take(done.raw_bytes, 1);
    account.keep(bytes, bytes > 0 ? 1 : 0);
    if (bytes > 0) {
      account.drop(drop_reason::kNormalizer, done.raw_bytes - bytes);
    } else {
      account.drop(drop_reason::kEmpty, done.raw_bytes, 1);
    }
  }

  void show_progress() {
    const auto now = std::chrono::steady_clock::now();
    if (now - last_progress < kProgressInterval) return;
    last_progress = now;
    say(label, ": ", with_commas(account.input().bytes), " bytes, ", with_commas(account.input().documents),
        " documents");
  }
};

PreparedDocuments::PreparedDocuments(DocumentSource& source, int threads, std::string progress_label, Work work)
    : state_(std::make_unique<State>(source, threads, std::move(progress_label), std::move(work))) {}
PreparedDocuments::~PreparedDocuments() = default;

bool PreparedDocuments::next(PreparedDocument& document) {
  State& s = *state_;
  while (true) {
    if (s.at == s.batch.size() && !s.refill()) return false;
    document = std::move(s.batch[s.at++]);
    if (!document.normalized.empty()) return true;
  }
}

const Account& PreparedDocuments::account() const { return state_->account; }

}  // namespace cram
