// The folder of one run: who owns it, what is in it, and whether the same command may go on in it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/folder_lock.h"
#include "base/options.h"

namespace cram {

class RunFolder {
 public:
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  /// Decides what `path` is, writing nothing: absent, empty or the shell of a run that was killed before it had begun
  /// (new run), ours (a run to resume), or something else, which is Error(20).
  explicit RunFolder(std::string path);

  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] bool is_new() const { return is_new_; }
  [[nodiscard]] std::string checkpoints() const { return path_ + "/checkpoints"; }

  /// --fresh: an existing run is kept under the next free name <path>.old-N; refused while somebody trains in it.
  void set_aside();

  /// Creates the folder where it is missing and keeps every other process out of it for this object's life.
  /// Error(kUsage) when somebody else trains there.
  void lock();

  /// Removes what a killed process left half written and opens the log file; the folder must be locked.
  void open();
  /// Once a start, when everything is resolved and accepted: environment.json with what this run found (`resolved`:
  /// options whose value is not as given), then config.toml with the options as given. The second makes it a run.
  void describe(const OptionTable& given, const std::map<std::string, std::string>& environment,
                const std::map<std::string, std::string>& resolved) const;

 private:
  std::string path_;
  bool is_new_ = true;
  FolderLock lock_;
};

/// <run>/logs/rank-00003.log
[[nodiscard]] std::string rank_log_path(const std::string& run_folder, int rank);

/// One more than the largest `attempt` in the folder's metrics.jsonl; 0 without one. Steps that are done again after a
/// crash are told apart by it, whatever the crash left behind.
[[nodiscard]] std::int64_t next_attempt(const std::string& run_folder);

/// runs/<8 hex digits of the settings that decide the numbers: model, data, train, seed>. `resolved`: see settings_of.
[[nodiscard]] std::string default_run_path(const OptionTable& options,
                                           const std::map<std::string, std::string>& resolved);

/// One line for each option that differs between a saved run and this command and may not: "train.lr: run 0.001, now
/// 0.002". An option that the run's program did not have yet counts as its default.
[[nodiscard]] std::vector<std::string> changed_settings(const std::map<std::string, std::string>& saved,
                                                        const OptionTable& options,
                                                        const std::map<std::string, std::string>& resolved);

}  // namespace cram
