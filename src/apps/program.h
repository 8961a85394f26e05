// What every program shares: one way to end, one command-line grammar.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace cram {

/// For a program of several ranks: who speaks, and that none is left waiting. They get the exit code.
struct FailureHooks {
  std::function<void(int)> before_report = {};
  std::function<void(int)> after_report = {};
};

/// Runs `body`, reports any exception on stderr in one message and returns the documented exit code.
[[nodiscard]] int guarded_main(const std::string& program, const std::function<int()>& body,
                               const FailureHooks& hooks = {});

/// A flag of a program: "--config FILE" (takes a value) or "--fresh".
struct Flag {
  std::string name;
  std::string help;
  bool takes_value = false;
};

/// A parsed command line: flags and bare arguments (`section.key=value`, subcommands, paths), in order.
class CommandLine {
 public:
  /// Throws Error(kUsage) naming the nearest flag for an unknown one. --help and --version are always known.
  CommandLine(const std::string& program, std::vector<Flag> flags, int argc, char** argv);

  [[nodiscard]] bool has(const std::string& flag) const;
  /// The flag's value, the last one when repeated, or `otherwise`.
  [[nodiscard]] std::string value(const std::string& flag, const std::string& otherwise = "") const;
  /// All values of a repeated flag.
  [[nodiscard]] std::vector<std::string> values(const std::string& flag) const;
  /// The flag's value; Error(kUsage) when it is missing or empty.
  [[nodiscard]] std::string required(const std::string& flag) const;
  /// The flag's value as a number, or `otherwise`; Error(kUsage) naming the flag for anything else.
  [[nodiscard]] std::int64_t integer(const std::string& flag, std::int64_t otherwise) const;
  [[nodiscard]] double number(const std::string& flag, double otherwise) const;
  [[nodiscard]] const std::vector<std::string>& arguments() const { return arguments_; }

  /// Answers --help (usage line, flags, then `more`) or --version on stdout; false when neither was given. The first
  /// thing that a program does with its command line.
  [[nodiscard]] bool answered(const std::string& usage, const std::string& more) const;

 private:
  std::string program_;
  std::vector<Flag> flags_;
  std::vector<std::pair<std::string, std::string>> given_;
  std::vector<std::string> arguments_;
};

}  // namespace cram
