#include "apps/program.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cxxopts.hpp>
#include <iostream>
#include <new>

#include "base/check.h"
#include "base/log.h"
#include "base/options.h"
#include "base/version.h"

namespace cram {
namespace {

bool is_out_of_memory(const std::string& what) {
  return what.find("can't allocate memory") != std::string::npos || what.find("out of memory") != std::string::npos;
}

// A closed standard descriptor would be given to the next file that is opened, and messages would land in it. A reader
// that goes away (`| head`) and a file-size limit must end in an error code, not in a signal's death.
void prepare_process() {
  for (int fd = 0; fd <= 2; ++fd) {
    if (::fcntl(fd, F_GETFD) == -1 && errno == EBADF) (void)::open("/dev/null", fd == 0 ? O_RDONLY : O_WRONLY);
  }
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);
}

}  // namespace

int guarded_main(const std::string& program, const std::function<int()>& body, const FailureHooks& hooks) {
  const auto report = [&](const std::string& what, ExitCode code) {
    if (hooks.before_report) hooks.before_report(static_cast<int>(code));
    live_line("");
    log_message(LogLevel::kError, program + ": " + what);
    if (hooks.after_report) hooks.after_report(static_cast<int>(code));
    return static_cast<int>(code);
  };
  try {
    prepare_process();
    return body();
  } catch (const Error& error) {
    return report(error.what(), error.code());
  } catch (const std::bad_alloc&) {
    return report("out of memory", ExitCode::kOutOfMemory);
  } catch (const std::exception& error) {
    const std::string what = error.what();
    // LibTorch appends a stack trace to its messages; the first line says what happened.
    const std::string first_line = what.substr(0, what.find('\n'));
    return is_out_of_memory(what) ? report(concat("out of memory (", first_line,
                                                  "); use a smaller train.micro_batch_size or a smaller model"),
                                           ExitCode::kOutOfMemory)
                                  : report(first_line, ExitCode::kOther);
  }
}

CommandLine::CommandLine(const std::string& program, std::vector<Flag> flags, int argc, char** argv)
    : program_(program), flags_(std::move(flags)) {
  flags_.insert(flags_.begin(), {{"help", "show this text"}, {"version", "show the version"}});
  cxxopts::Options options(program);
  options.allow_unrecognised_options();
  for (const Flag& flag : flags_) {
    if (flag.takes_value) {
      options.add_options()(flag.name, flag.help, cxxopts::value<std::string>());
    } else {
      options.add_options()(flag.name, flag.help);
    }
  }
  try {
    const cxxopts::ParseResult result = options.parse(argc, argv);
    for (const auto& pair : result.arguments()) given_.emplace_back(pair.key(), pair.value());
    for (const std::string& argument : result.unmatched()) {
      if (argument.size() < 2 || argument[0] != '-') {
        arguments_.push_back(argument);
        continue;
      }
      std::vector<std::string> names;
      for (const Flag& flag : flags_) names.push_back("--" + flag.name);
      const std::string shown = argument.substr(0, 60);
      fail(ExitCode::kUsage, "unknown flag ", shown, "; the nearest is ", nearest_name(shown, names),
           " (--help lists all)");
    }
  } catch (const cxxopts::exceptions::exception& error) {
    fail(ExitCode::kUsage, error.what());
  }
}

bool CommandLine::has(const std::string& flag) const {
  return std::any_of(given_.begin(), given_.end(), [&](const auto& pair) { return pair.first == flag; });
}

std::string CommandLine::value(const std::string& flag, const std::string& otherwise) const {
  const auto found = std::find_if(given_.rbegin(), given_.rend(), [&](const auto& pair) { return pair.first == flag; });
  return found == given_.rend() ? otherwise : found->second;
}

std::vector<std::string> CommandLine::values(const std::string& flag) const {
  std::vector<std::string> all;
  for (const auto& [name, value] : given_) {
    if (name == flag) all.push_back(value);
  }
  return all;
}

std::string CommandLine::required(const std::string& flag) const {
  CRAM_CHECK(has(flag), ExitCode::kUsage, "--", flag, " is missing (--help lists all)");
  CRAM_CHECK(!value(flag).empty(), ExitCode::kUsage, "--", flag, " is empty");
  return value(flag);
}

std::int64_t CommandLine::integer(const std::string& flag, std::int64_t otherwise) const {
  return has(flag) ? parse_integer(value(flag), "--" + flag) : otherwise;
}

double CommandLine::number(const std::string& flag, double otherwise) const {
  return has(flag) ? parse_double(value(flag), "--" + flag) : otherwise;
}

bool CommandLine::answered(const std::string& usage, const std::string& more) const {
  if (has("help")) {
    std::string text = "usage: " + usage + "\n\n";
    for (const Flag& flag : flags_) {
      const std::string left = "  --" + flag.name + (flag.takes_value ? " VALUE" : "");
      text += left + std::string(left.size() < 28 ? 28 - left.size() : 1, ' ') + flag.help + "\n";
    }
    std::cout << text << (more.empty() ? "" : "\n" + more);
    return true;
  }
  if (!has("version")) return false;
  std::cout << version_line(program_.substr(0, program_.find(' '))) << "\n";
  return true;
}

}  // namespace cram
