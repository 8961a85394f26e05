#include "run/budget_clock.h"

#include <sstream>

#include "base/file_io.h"

namespace cram {
namespace {

constexpr std::string_view kVirtual = "virtual:";
constexpr std::string_view kReplay = "replay:";

bool starts_with(const std::string& text, std::string_view start) { return text.rfind(start, 0) == 0; }

std::vector<ReplayedStep> read_clock_log(const std::string& path) {
  std::istringstream lines(read_file(path, ExitCode::kUsage));
  std::vector<ReplayedStep> steps;
  std::string line;
  for (std::size_t number = 1; std::getline(lines, line); ++number) {
    if (line.empty() || line[0] == '#') continue;
    const std::string where = concat(path, ":", number);
    std::istringstream words(line);
    std::vector<std::string> columns;
    for (std::string word; words >> word;) columns.push_back(word);
    CRAM_CHECK(columns.size() == 3, ExitCode::kUsage, where, ": expected step, fraction and batch size, got ",
               columns.size(), " columns");
    const std::int64_t step = parse_integer(columns[0], where);
    const ReplayedStep replayed{parse_double(columns[1], where), parse_integer(columns[2], where)};
    // A resumed run writes its redone steps again; the last line of a step counts.
    CRAM_CHECK(step >= 1 && step <= static_cast<std::int64_t>(steps.size()) + 1, ExitCode::kUsage, where,
               ": no line for step ", steps.size() + 1, " before step ", step);
    steps.resize(static_cast<std::size_t>(step));
    const double before = step > 1 ? steps[static_cast<std::size_t>(step) - 2].fraction : 0;
    CRAM_CHECK(replayed.fraction >= before && replayed.fraction < 1, ExitCode::kUsage, where, ": the fraction ",
               columns[1], " is not between the step before, ", before, ", and 1");
    steps.back() = replayed;
  }
  CRAM_CHECK(!steps.empty(), ExitCode::kUsage, path, " has no steps to replay");
  return steps;
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
    const double step_s = parse_double(clock.substr(kVirtual.size()), "train.clock");
    CRAM_CHECK(step_s > 0 && step_s < 1e9, ExitCode::kUsage, "train.clock=", clock,
               ": the seconds of a step must be positive and below 1e9");
  }
  if (starts_with(clock, kReplay)) (void)read_clock_log(clock.substr(kReplay.size()));
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
    replay_ = read_clock_log(clock.substr(kReplay.size()));
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
    case Kind::kReplay:
      return covers_next_step(progress) ? replay_[static_cast<std::size_t>(progress.step)].fraction : 1.0;
    case Kind::kWall:
    case Kind::kVirtual: break;
  }
  return progress.elapsed_s / budget_.seconds();
}

bool BudgetClock::covers_next_step(const Progress& progress) const {
  return kind_ != Kind::kReplay || progress.step < static_cast<std::int64_t>(replay_.size());
}

void BudgetClock::check_replayed_batch(const Progress& progress, std::int64_t batch_size) const {
  if (kind_ != Kind::kReplay) return;
  const std::int64_t recorded = replay_[static_cast<std::size_t>(progress.step)].batch_size;
  CRAM_CHECK(recorded == batch_size, ExitCode::kUsage, "replay: step ", progress.step + 1, " had a batch of ", recorded,
             " in the log, these settings give ", batch_size, "; replay with the settings of the recorded run");
}

}  // namespace cram
