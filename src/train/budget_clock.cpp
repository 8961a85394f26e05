#include "train/budget_clock.h"

#include <sstream>

#include "base/file_io.h"

namespace cram {
namespace {

constexpr std::string_view kVirtual = "virtual:";
constexpr std::string_view kReplay = "replay:";

bool starts_with(const std::string& text, std::string_view start) { return text.rfind(start, 0) == 0; }

std::vector<double> read_fractions(const std::string& path) {
  std::istringstream lines(read_file(path, ExitCode::kUsage));
  std::vector<double> fractions;
  std::string line;
  while (std::getline(lines, line)) {
    if (line.empty() || line[0] == '#') continue;
    std::istringstream words(line);
    std::string step_text, fraction_text;
    words >> step_text >> fraction_text;
    const std::int64_t step = parse_integer(step_text, path);
    // A resumed run writes its redone steps again; the last line of a step counts.
    CRAM_CHECK(step >= 1 && step <= static_cast<std::int64_t>(fractions.size()) + 1, ExitCode::kUsage, path,
               " has no line for step ", fractions.size() + 1, " before step ", step);
    fractions.resize(static_cast<std::size_t>(step));
    fractions.back() = parse_double(fraction_text, path);
  }
  CRAM_CHECK(!fractions.empty(), ExitCode::kUsage, path, " has no steps to replay");
  return fractions;
}

}  // namespace

void check_clock(const Quantity& budget, const std::string& clock) {
  const bool counts = clock == "steps" || clock == "tokens";
  const bool timed = clock == "wall" || starts_with(clock, kVirtual);
  CRAM_CHECK(counts || timed || starts_with(clock, kReplay), ExitCode::kUsage, "train.clock=", clock,
             " is not one of auto, wall, steps, tokens, virtual:S, replay:FILE");
  CRAM_CHECK(!counts || budget.unit == clock, ExitCode::kUsage, "train.clock=", clock,
             " cannot consume train.budget=", budget.text(), "; give the budget in ", clock);
  CRAM_CHECK(!timed || budget.is_time(), ExitCode::kUsage, "train.clock=", clock,
             " cannot consume train.budget=", budget.text(), "; give the budget as a time, for example 24h");
  if (starts_with(clock, kVirtual)) {
    CRAM_CHECK(parse_double(clock.substr(kVirtual.size()), "train.clock") > 0, ExitCode::kUsage, "train.clock=", clock,
               ": the seconds of a step must be positive");
  }
}

BudgetClock::BudgetClock(const Quantity& budget, const std::string& clock) : budget_(budget), kind_(Kind::kWall) {
  check_clock(budget, clock);
  if (clock == "steps") kind_ = Kind::kSteps;
  if (clock == "tokens") kind_ = Kind::kTokens;
  if (starts_with(clock, kVirtual)) {
    kind_ = Kind::kVirtual;
    virtual_step_s_ = parse_double(clock.substr(kVirtual.size()), "train.clock");
  }
  if (starts_with(clock, kReplay)) {
    kind_ = Kind::kReplay;
    replay_ = read_fractions(clock.substr(kReplay.size()));
  }
}

double BudgetClock::running_s() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - since_).count();
}

void BudgetClock::start(double elapsed_s) {
  base_s_ = elapsed_s;
  since_ = std::chrono::steady_clock::now();
  running_ = true;
}

void BudgetClock::pause() {
  CRAM_DCHECK(running_);
  base_s_ += running_s();
  since_ = std::chrono::steady_clock::now();
  running_ = false;
}

double BudgetClock::resume() {
  CRAM_DCHECK(!running_);
  const double paused_s = running_s();
  since_ = std::chrono::steady_clock::now();
  running_ = true;
  return paused_s;
}

double BudgetClock::elapsed_s(const Progress& progress) const {
  if (kind_ == Kind::kVirtual) return virtual_step_s_ * static_cast<double>(progress.step);
  return base_s_ + (running_ ? running_s() : 0);
}

double BudgetClock::fraction(const Progress& progress) const {
  switch (kind_) {
    case Kind::kSteps: return static_cast<double>(progress.step) / budget_.value;
    case Kind::kTokens: return static_cast<double>(progress.tokens) / budget_.value;
    case Kind::kReplay: return covers_next_step(progress) ? replay_[static_cast<std::size_t>(progress.step)] : 1.0;
    case Kind::kWall:
    case Kind::kVirtual: break;
  }
  return progress.elapsed_s / budget_.seconds();
}

bool BudgetClock::covers_next_step(const Progress& progress) const {
  return kind_ != Kind::kReplay || progress.step < static_cast<std::int64_t>(replay_.size());
}

}  // namespace cram
