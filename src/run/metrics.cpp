#include "run/metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/file_io.h"
#include "base/log.h"

namespace cram {
namespace {

std::string text_field(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string fixed(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

std::string short_scientific(double value) {
  char text[64];
  std::snprintf(text, sizeof text, "%.1e", value);
  std::string out = text;
  // 4.1e-04 -> 4.1e-4
  const std::size_t e = out.find('e');
  if (e != std::string::npos && out.size() > e + 2 && out[e + 2] == '0') out.erase(e + 2, 1);
  return out;
}

}  // namespace

LineFile::LineFile(const std::string& path)
    : path_(path), fd_(::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0644)) {
  CRAM_CHECK(fd_ >= 0, ExitCode::kOther, "cannot open ", path, " for appending: ", std::strerror(errno));
  std::error_code error;
  if (std::filesystem::file_size(path, error) > 0 && !error) {
    const std::string content = read_file(path);
    const std::size_t whole = content.rfind('\n') + 1;  // npos + 1 = 0
    if (whole != content.size()) std::filesystem::resize_file(path, whole);
  }
}

LineFile::~LineFile() { ::close(fd_); }

void LineFile::append(const std::string& line) {
  const off_t before = ::lseek(fd_, 0, SEEK_END);
  const std::string text = line + "\n";
  ssize_t put = 0;
  do {
    put = ::write(fd_, text.data(), text.size());
  } while (put < 0 && errno == EINTR);
  if (put == static_cast<ssize_t>(text.size())) {
    if (lost_ > 0) log_warning(path_, ": writing works again, ", lost_, " lines were lost");
    lost_ = 0;
    return;
  }
  const std::string reason = put < 0 ? std::strerror(errno) : "no space left on the device";
  if (put > 0 && ::ftruncate(fd_, before) != 0) log_warning(path_, " has a torn line: ", std::strerror(errno));
  if (lost_++ == 0) log_warning("a line of ", path_, " (", text.size(), " bytes) could not be written: ", reason);
}

MetricsFiles::MetricsFiles(const std::string& run_folder, bool writes) {
  if (!writes) return;
  metrics_.emplace(run_folder + "/metrics.jsonl");
  clock_log_.emplace(run_folder + "/clock.log");
  tensorboard_.emplace(run_folder + "/tb");
}

void MetricsFiles::write(const std::string& line) { metrics_->append(line); }

void MetricsFiles::train(const StepRecord& r, const Progress& p, double budget_fraction, double left_s) {
  if (!metrics_) return;
  write(concat(
      R"({"kind":"train","step":)", r.step, ",\"loss\":", format_double17(r.loss), ",\"lr\":", format_double17(r.lr),
      ",\"grad_norm\":", format_double17(r.grad_norm), ",\"batch_size\":", r.batch_size, ",\"tokens\":", p.tokens,
      ",\"tokens_per_s\":", format_double17(r.tokens_per_s), ",\"mfu\":null",
      ",\"elapsed_s\":", format_double17(p.elapsed_s), ",\"budget_fraction\":", format_double17(budget_fraction),
      ",\"data_wait\":", format_double17(r.step_s > 0 ? r.data_wait_s / r.step_s : 0),
      ",\"left_s\":", format_double17(left_s), ",\"skipped\":", p.skipped, ",\"attempt\":", p.attempt, "}"));
  clock_log_->append(concat(r.step, " ", format_double17(r.fraction), " ", r.batch_size));
  tensorboard_->scalar("train/loss", r.step, r.loss);
  tensorboard_->scalar("train/grad_norm", r.step, r.grad_norm);
  tensorboard_->scalar("train/lr", r.step, r.lr);
  tensorboard_->scalar("train/batch_size", r.step, static_cast<double>(r.batch_size));
  tensorboard_->scalar("train/tokens_per_s", r.step, r.tokens_per_s);
  tensorboard_->flush();
}

void MetricsFiles::eval(const EvalRecord& r, const Progress& p) {
  if (!metrics_) return;
  write(concat(R"({"kind":"eval","step":)", p.step, ",\"eval_loss\":", format_double17(r.loss),
               ",\"eval_accuracy\":", format_double17(r.accuracy), ",\"masked\":", r.masked, ",\"tokens\":", p.tokens,
               ",\"elapsed_s\":", format_double17(p.elapsed_s), ",\"attempt\":", p.attempt, "}"));
  tensorboard_->scalar("eval/loss", p.step, r.loss);
  tensorboard_->scalar("eval/accuracy", p.step, r.accuracy);
  tensorboard_->flush();
}

void MetricsFiles::event(const std::string& name, const std::string& detail, const Progress& p) {
  if (!metrics_) return;
  write(concat(R"({"kind":"event","step":)", p.step, ",\"event\":", text_field(name), ",\"detail\":",
               text_field(detail), ",\"elapsed_s\":", format_double17(p.elapsed_s), ",\"attempt\":", p.attempt, "}"));
}

void MetricsFiles::summary(const Summary& s) {
  if (!metrics_) return;
  const auto bytes = [](const Traffic& t) {
    return concat(R"({"tensor":)", format_double17(t.tensor), ",\"pipeline\":", format_double17(t.pipeline),
                  ",\"data\":", format_double17(t.data), ",\"tied\":", format_double17(t.tied), "}");
  };
  const std::string traffic =
      s.traffic ? concat(",\"sent_bytes\":", bytes(s.traffic->sent), ",\"planned_bytes\":", bytes(s.traffic->planned))
                : "";
  write(concat(R"({"kind":"summary","reason":)", text_field(s.reason), ",\"steps\":", s.progress.step,
               ",\"tokens\":", s.progress.tokens, ",\"elapsed_s\":", format_double17(s.progress.elapsed_s),
               ",\"excluded_s\":", format_double17(s.progress.excluded_s),
               ",\"tokens_per_s\":", format_double17(s.tokens_per_s), ",\"lr_end\":", format_double17(s.lr_end),
               ",\"eval_loss\":", s.eval ? format_double17(s.eval->loss) : "null",
               ",\"eval_accuracy\":", s.eval ? format_double17(s.eval->accuracy) : "null",
               ",\"skipped\":", s.progress.skipped, ",\"attempt\":", s.progress.attempt, traffic, "}"));
}

std::string ProgressLine::text(const StepRecord& r, const Progress& p, double fraction, double left_s) {
  if (std::isfinite(r.loss)) {
    loss_ema_ = has_ema_ ? 0.98 * loss_ema_ + 0.02 * r.loss : r.loss;
    has_ema_ = true;
  }
  const std::string used = budget_.is_time() ? format_duration(p.elapsed_s) + "/" + budget_.text()
                           : budget_.unit == "steps"
                               ? format_grouped(p.step) + "/" + budget_.text()
                               : format_count(static_cast<double>(p.tokens)) + "/" + budget_.text();
  std::string line =
      concat("  ", used, " ", fixed(100 * std::min(fraction, 1.0), 1), "% | step ", format_grouped(r.step), " | loss ",
             fixed(r.loss, 3), " (ema ", fixed(loss_ema_, 3), ") | gnorm ", fixed(r.grad_norm, 2), " | lr ",
             short_scientific(r.lr), " | bs ", r.batch_size, " | ", format_count(r.tokens_per_s), " tok/s | data ",
             fixed(r.step_s > 0 ? 100 * r.data_wait_s / r.step_s : 0, 1), "% | left ", format_duration(left_s));
  if (ever_saved_) line += concat(" | ckpt ", format_duration(p.elapsed_s - last_save_s_), " ago");
  if (p.skipped > 0) line += concat(" | skipped ", p.skipped);
  return line;
}

std::string format_duration(double seconds) {
  if (!std::isfinite(seconds)) return "?";
  const auto whole = static_cast<std::int64_t>(std::llround(std::max(0.0, seconds)));
  if (whole >= 86400) return concat(whole / 86400, "d", whole % 86400 / 3600, "h");
  if (whole >= 3600) return concat(whole / 3600, "h", whole % 3600 / 60, "m");
  if (whole >= 60) return concat(whole / 60, "m", whole % 60, "s");
  return concat(whole, "s");
}

std::string format_count(double value) {
  constexpr const char* kSuffixes[] = {"", "k", "M", "G", "T"};
  std::size_t power = 0;
  while (value >= 999.5 && power + 1 < std::size(kSuffixes)) {
    value /= 1000;
    ++power;
  }
  return fixed(value, power > 0 && value < 99.5 ? 1 : 0) + kSuffixes[power];
}

std::string format_grouped(std::int64_t value) {
  std::string digits = std::to_string(value);
  for (auto i = static_cast<std::ptrdiff_t>(digits.size()) - 3; i > (value < 0 ? 1 : 0); i -= 3) {
    digits.insert(static_cast<std::size_t>(i), ",");
  }
  return digits;
}

}  // namespace cram
