#include "train/run_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/digest.h"
#include "base/file_io.h"
#include "base/log.h"

namespace cram {
namespace {

namespace fs = std::filesystem;
constexpr const char* kConfigFile = "config.toml";
constexpr std::string_view kHeader = "# cram run";

}  // namespace

RunFolder::RunFolder(std::string path) : path_(std::move(path)) {
  std::error_code error;
  const fs::file_status status = fs::status(path_, error);
  if (status.type() == fs::file_type::not_found) return;
  constexpr ExitCode kBad = ExitCode::kNoCheckpoint;
  CRAM_CHECK(fs::is_directory(status), kBad, path_, " exists and is not a folder; choose another run.output");
  const bool empty = fs::is_empty(path_, error);
  CRAM_CHECK(!error, kBad, "cannot look into ", path_, ": ", error.message());
  if (empty) return;
  is_new_ = false;
  const fs::path config = fs::path(path_) / kConfigFile;
  CRAM_CHECK(fs::exists(config, error), kBad, path_, " is not empty and not a run folder (no ", kConfigFile,
             "); choose another run.output");
  CRAM_CHECK(read_file(config, kBad).rfind(kHeader, 0) == 0, kBad, config.string(),
             " was not written by cram_train; choose another run.output");
}

void RunFolder::set_aside() {
  if (is_new_) return;
  lock();
  int number = 1;
  while (fs::exists(concat(path_, ".old-", number))) ++number;
  const std::string kept = concat(path_, ".old-", number);
  rename_path(path_, kept);
  log_info("--fresh: the run that was in ", path_, " is kept as ", kept);
  is_new_ = true;
  unlock();
}

RunFolder::~RunFolder() { unlock(); }

void RunFolder::unlock() noexcept {
  if (lock_fd_ >= 0) ::close(std::exchange(lock_fd_, -1));  // the lock goes with the descriptor
}

void RunFolder::lock() {
  make_folders(path_);
  const std::string file = path_ + "/lock";
  lock_fd_ = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  CRAM_CHECK(lock_fd_ >= 0, ExitCode::kOther, "cannot create ", file, ": ", std::strerror(errno));
  CRAM_CHECK(::flock(lock_fd_, LOCK_EX | LOCK_NB) == 0, ExitCode::kUsage, "another process trains in ", path_,
             " (it holds ", file, "); wait for it or choose another run.output");
}

void RunFolder::open(const OptionTable& options, const std::map<std::string, std::string>& environment) {
  CRAM_DCHECK(lock_fd_ >= 0);
  make_folders(path_ + "/logs");
  write_file_atomically(fs::path(path_) / kConfigFile,
                        concat(kHeader, ": every option with its resolved value\n\n", options.dump_toml(true)));
  write_file_atomically(fs::path(path_) / "environment.json", nlohmann::json(environment).dump(1) + "\n");
  open_log_file(rank_log_path(path_, 0));
}

std::string rank_log_path(const std::string& run_folder, int rank) {
  std::string digits = std::to_string(rank);
  return run_folder + "/logs/rank-" + std::string(digits.size() < 5 ? 5 - digits.size() : 0, '0') + digits + ".log";
}

std::int64_t next_attempt(const std::string& run_folder) {
  std::ifstream metrics(run_folder + "/metrics.jsonl");
  constexpr std::string_view kKey = "\"attempt\":";
  std::int64_t next = 0;
  std::string line;
  while (std::getline(metrics, line)) {
    const std::size_t key = line.rfind(kKey);
    if (key == std::string::npos || line.back() != '}') continue;  // torn by a crash
    next = std::max(next,
                    parse_integer(line.substr(key + kKey.size(), line.size() - 1 - key - kKey.size()), run_folder) + 1);
  }
  return next;
}

std::string default_run_path(const OptionTable& options) {
  std::string decisive;
  for (const Option& row : options.rows()) {
    const std::string section = row.key().substr(0, row.key().find('.'));
    const bool counts = section == "model" || section == "train" || row.key() == "run.seed" ||
                        row.key() == "data.shards" || row.key() == "data.shuffle";
    if (counts && row.key() != "train.micro_batch_size") decisive += row.key() + "=" + row.value_text() + "\n";
  }
  return "runs/" + digest_text(decisive).substr(0, 8);
}

std::vector<std::string> changed_settings(const std::map<std::string, std::string>& saved, const OptionTable& options) {
  std::vector<std::string> changes;
  for (const Option& row : options.rows()) {
    const auto old = saved.find(row.key());
    if (row.is_free_on_resume() || old == saved.end() || old->second == row.value_text()) continue;
    changes.push_back(concat(row.key(), ": the run has ", old->second, ", this command ", row.value_text()));
  }
  return changes;
}

}  // namespace cram
