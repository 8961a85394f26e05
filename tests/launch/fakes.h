// Launchers and schedulers that only write down what they were asked, put first in PATH, and the scripts run with them.
#pragma once

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "support/run_program.h"

namespace cram::test {

inline void write_script(const std::string& path, const std::string& text) {
  std::ofstream(path) << "#!/usr/bin/env bash\n" << text;
  std::filesystem::permissions(path, std::filesystem::perms::owner_all);
}

/// Fake srun, mpirun and scontrol in one folder, with what they were called with.
class Fakes {
 public:
  using Environment = std::vector<std::pair<std::string, std::string>>;

  Fakes() {
    // One line a call, one pair of brackets an argument. FAKE_WAIT: goes on until a signal comes, and notes which.
    const std::string launcher = R"(
[ "${1:-}" = --version ] && { echo "${FAKE_VERSION-mpirun (Open MPI) 4.1.4}"; exit 0; }
{ printf '%s' "${0##*/}"; printf ' [%s]' "$@" | tr '\n' ' '; echo; } >>"$FAKE_LOG"
if [ -n "${FAKE_WAIT:-}" ]; then
  for signal in USR1 TERM INT HUP; do trap "echo got $signal >>'$FAKE_LOG'; exit $FAKE_EXIT" "$signal"; done
  echo ready
  for _ in {1..600}; do sleep 0.05; done
fi
if [ -n "${FAKE_RUN:-}" ]; then
  while [[ $1 == --* ]]; do shift; done
  for rank in 0 1; do SLURM_PROCID=$rank SLURM_STEP_NUM_TASKS=$SLURM_NTASKS "$@"; done
fi
exit "${FAKE_EXIT:-0}"
)";
    write_script(folder_ / "srun", launcher);
    write_script(folder_ / "mpirun", launcher);
    write_script(folder_ / "scontrol", R"(
[ "$1" = show ] && { echo "   JobState=${FAKE_STATE:-RUNNING Reason=None}"; exit 0; }
echo "scontrol $*" >>"$FAKE_LOG"
exit "${FAKE_SCONTROL_EXIT:-0}"
)");
    write_script(folder_ / "cram_train", R"(echo "rank $SLURM_PROCID of $SLURM_STEP_NUM_TASKS: $*")");
    std::ofstream(log_path()) << "";
  }

  [[nodiscard]] Environment environment(const Environment& more) const {
    Environment all = {{"PATH", folder_.path().string() + ":" + std::getenv("PATH")},
                       {"FAKE_LOG", log_path()},
                       {"CRAM_TRAIN", folder_ / "cram_train"}};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  [[nodiscard]] std::string path(const std::string& name) const { return folder_ / name; }
  [[nodiscard]] std::string log() const {
    std::ostringstream text;
    text << std::ifstream(log_path()).rdbuf();
    return text.str();
  }
  /// How often the text occurs in the log.
  [[nodiscard]] int count(const std::string& text) const {
    const std::string all = log();
    int found = 0;
    for (std::size_t at = all.find(text); at != std::string::npos; at = all.find(text, at + 1)) ++found;
    return found;
  }
  void clear() const { std::ofstream(log_path(), std::ios::trunc) << ""; }

 private:
  [[nodiscard]] std::string log_path() const { return folder_ / "log.txt"; }
  TemporaryFolder folder_;
};

}  // namespace cram::test
