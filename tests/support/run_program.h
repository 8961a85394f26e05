// Starts one of the built programs as a person would, with a time limit, and returns what it printed and how it ended.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/temporary_folder.h"

namespace cram::test {

struct ProgramResult {
  int exit_code = -1;  ///< 128 + signal when a signal ended it, -1 after the time limit
  std::string out;     ///< stdout and stderr together
  double seconds = 0;
};

/// A running program; `wait` must be called once.
class RunningProgram {
 public:
  /// argv[0] without a slash is looked up beside the other built programs.
  RunningProgram(std::vector<std::string> argv, const std::string& working_folder,
                 const std::vector<std::pair<std::string, std::string>>& environment = {})
      : start_(std::chrono::steady_clock::now()) {
    if (argv.at(0).find('/') == std::string::npos) argv[0] = std::string(CRAM_PROGRAM_DIR) + "/" + argv[0];
    log_path_ = folder_ / "out.txt";
    std::vector<char*> raw;
    for (std::string& argument : argv) raw.push_back(argument.data());
    raw.push_back(nullptr);
    pid_ = ::fork();
    if (pid_ < 0) throw std::runtime_error("fork failed");
    if (pid_ == 0) {
      const int log = ::open(log_path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
      const int none = ::open("/dev/null", O_RDONLY);
      ::dup2(none, 0);
      ::dup2(log, 1);
      ::dup2(log, 2);
      ::setenv("OMP_NUM_THREADS", "1", 1);
      for (const auto& [name, value] : environment) ::setenv(name.c_str(), value.c_str(), 1);
      if (::chdir(working_folder.c_str()) != 0) ::_exit(126);
      ::execvp(raw[0], raw.data());
      ::_exit(127);
    }
  }
  ~RunningProgram() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
  }
  RunningProgram(const RunningProgram&) = delete;
  RunningProgram& operator=(const RunningProgram&) = delete;

  void send(int signal_number) const { ::kill(pid_, signal_number); }

  [[nodiscard]] std::string output_so_far() const {
    std::ostringstream text;
    text << std::ifstream(log_path_).rdbuf();
    return text.str();
  }

  /// Waits until the output holds the text; false when the program ended or the time ran out first.
  [[nodiscard]] bool wait_for_output(const std::string& text, double limit_s = 60) {
    while (elapsed_s() < limit_s) {
      if (output_so_far().find(text) != std::string::npos) return true;
      siginfo_t info{};
      if (::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0) {
        return output_so_far().find(text) != std::string::npos;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return false;
  }

  [[nodiscard]] ProgramResult wait(double limit_s = 100) {
    ProgramResult result;
    int status = 0;
    pid_t ended = 0;
    while ((ended = ::waitpid(pid_, &status, WNOHANG)) == 0 && elapsed_s() < limit_s) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    if (ended == 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, &status, 0);
    } else {
      result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }
    pid_ = -1;
    result.seconds = elapsed_s();
    result.out = output_so_far();
    return result;
  }

 private:
  [[nodiscard]] double elapsed_s() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  TemporaryFolder folder_;
  std::string log_path_;
  pid_t pid_ = -1;
  std::chrono::steady_clock::time_point start_;
};

inline ProgramResult run_program(std::vector<std::string> argv, const std::string& working_folder, double limit_s = 100,
                                 const std::vector<std::pair<std::string, std::string>>& environment = {}) {
  RunningProgram program(std::move(argv), working_folder, environment);
  return program.wait(limit_s);
}

}  // namespace cram::test
