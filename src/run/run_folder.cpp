#include "run/run_folder.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/digest.h"
#include "base/file_io.h"
#include "base/log.h"

namespace cram {
namespace {

namespace fs = std::filesystem;
constexpr const char* kConfigFile = "config.toml";
constexpr const char* kEnvironmentFile = "environment.json";
constexpr std::string_view kHeader = "# cram run";

// A run that was killed before config.toml was there has made these and nothing that could be lost.
bool is_shell(const fs::path& folder) {
  std::error_code error;
  for (fs::recursive_directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().lexically_relative(folder).generic_string();
    const bool made_by_a_start = name == "logs" || name == kEnvironmentFile || name.rfind("logs/rank-", 0) == 0 ||
                                 name.rfind("logs/stuck-rank-", 0) == 0 || is_temporary_name(name);
    if (!made_by_a_start) return false;
  }
  return !error;
}

}  // namespace

RunFolder::RunFolder(std::string path) : path_(std::move(path)) {
  std::error_code error;
  // Behind a link lies the folder that is meant: --fresh must rename it, not the link.
  if (fs::is_symlink(path_, error)) path_ = fs::weakly_canonical(path_).string();
  const fs::file_status status = fs::status(path_, error);
  if (status.type() == fs::file_type::not_found) return;
  constexpr ExitCode kBad = ExitCode::kNoCheckpoint;
  CRAM_CHECK(fs::is_directory(status), kBad, path_, " exists and is not a folder; choose another run.output");
  const bool empty = fs::is_empty(path_, error);
  CRAM_CHECK(!error, kBad, "cannot look into ", path_, ": ", error.message());
  if (empty || is_shell(path_)) return;
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
  lock_ = FolderLock();
}

void RunFolder::lock() { lock_ = FolderLock(path_, "trains in"); }

void RunFolder::open() {
  CRAM_DCHECK(lock_.held());
  make_folders(path_ + "/logs");
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(path_, error)) {
    if (is_temporary_name(entry.path().filename().string())) remove_tree(entry.path());
  }
  open_log_file(rank_log_path(path_, 0));
}

void RunFolder::describe(const OptionTable& given, const std::map<std::string, std::string>& environment,
                         const std::map<std::string, std::string>& resolved) const {
  nlohmann::json found(environment);
  found["resolved"] = resolved;
  write_file_atomically(fs::path(path_) / kEnvironmentFile, found.dump(1) + "\n");
  write_file_atomically(fs::path(path_) / kConfigFile,
                        concat(kHeader, ": every option as given (what auto became stands in ", kEnvironmentFile,
                               ")\n\n", given.dump_toml(true)));
}

std::string rank_log_path(const std::string& run_folder, int rank) {
  std::string digits = std::to_string(rank);
  return run_folder + "/logs/rank-" + std::string(digits.size() < 5 ? 5 - digits.size() : 0, '0') + digits + ".log";
}

std::int64_t next_attempt(const std::string& run_folder) {
  std::ifstream metrics(run_folder + "/metrics.jsonl");
  std::int64_t next = 0;
  std::string line;
  while (std::getline(metrics, line)) {
    // A crash may have torn a line; what is not an object with a number is no attempt.
    const nlohmann::json entry = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!entry.is_object()) continue;
    const auto attempt = entry.find("attempt");
    if (attempt != entry.end() && attempt->is_number_integer()) next = std::max(next, attempt->get<std::int64_t>() + 1);
  }
  return next;
}

std::string default_run_path(const OptionTable& options, const std::map<std::string, std::string>& resolved) {
  std::string decisive;
  for (const Option& row : options.rows()) {
    const std::string section = row.key().substr(0, row.key().find('.'));
    const bool counts = section == "model" || section == "train" || row.key() == "run.seed" ||
                        row.key() == "data.shards" || row.key() == "data.shuffle";
    if (!counts || row.key() == "train.micro_batch_size") continue;
    const std::string& value = resolved.at(row.key());
    // Of an option that came later only another value than the default counts: a command finds its older run.
    if (row.came_later() && value == row.default_text()) continue;
    decisive += row.key() + "=" + value + "\n";
  }
  return "runs/" + digest_text(decisive).substr(0, 8);
}

std::vector<std::string> changed_settings(const std::map<std::string, std::string>& saved, const OptionTable& options,
                                          const std::map<std::string, std::string>& resolved) {
  std::vector<std::string> changes;
  for (const Option& row : options.rows()) {
    const auto old = saved.find(row.key());
    const std::string& before = old == saved.end() ? row.default_text() : old->second;
    const std::string& now = resolved.at(row.key());
    if (row.is_free_on_resume() || before == now) continue;
    changes.push_back(concat(row.key(), ": the run has ", before, ", this command ", now));
  }
  return changes;
}

}  // namespace cram
