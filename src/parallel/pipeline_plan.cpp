#include "parallel/pipeline_plan.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "base/check.h"

namespace cram {
namespace {

struct Computation {
  bool is_forward = true;
  int micro_batch = 0;
  int block = 0;
};

std::vector<Computation> gpipe_order(const PlanShape& shape, int rank) {
  std::vector<Computation> order;
  for (int i = 0; i < shape.micro_batches; ++i) order.push_back({true, i, rank});
  for (int i = 0; i < shape.micro_batches; ++i) order.push_back({false, i, rank});
  return order;
}

// Warm-up forwards, then one forward and one backward in turn, then the backwards that are left.
std::vector<Computation> alternating(const std::vector<Computation>& forwards,
                                     const std::vector<Computation>& backwards, std::size_t warm_up) {
  std::vector<Computation> order(forwards.begin(), forwards.begin() + static_cast<std::ptrdiff_t>(warm_up));
  for (std::size_t i = warm_up; i < forwards.size(); ++i) {
    order.push_back(forwards[i]);
    order.push_back(backwards[i - warm_up]);
  }
  order.insert(order.end(), backwards.end() - static_cast<std::ptrdiff_t>(warm_up), backwards.end());
  return order;
}

std::vector<Computation> one_forward_one_backward_order(const PlanShape& shape, int rank) {
  std::vector<Computation> forwards, backwards;
  for (int i = 0; i < shape.micro_batches; ++i) {
    forwards.push_back({true, i, rank});
    backwards.push_back({false, i, rank});
  }
  return alternating(forwards, backwards,
                     static_cast<std::size_t>(std::min(shape.stages - rank - 1, shape.micro_batches)));
}

// Groups of p micro-batches pass chunk 0, 1, ... of a rank; backwards pass the chunks in reverse.
std::vector<Computation> interleaved_order(const PlanShape& shape, int rank) {
  const int p = shape.stages, v = shape.virtual_stages, m = shape.micro_batches;
  std::vector<Computation> forwards, backwards;
  for (int group = 0; group < m; group += p) {
    for (int chunk = 0; chunk < v; ++chunk) {
      for (int i = group; i < group + p; ++i) {
        forwards.push_back({true, i, chunk * p + rank});
        backwards.push_back({false, i, (v - 1 - chunk) * p + rank});
      }
    }
  }
  const int warm_up = m == p ? m * v : std::min(2 * (p - rank - 1) + (v - 1) * p, m * v);
  return alternating(forwards, backwards, static_cast<std::size_t>(warm_up));
}

std::vector<Computation> forward_order(const PlanShape& shape, int rank) {
  std::vector<Computation> order;
  for (int i = 0; i < shape.micro_batches; ++i) {
    for (int block = rank; block < shape.blocks(); block += shape.stages) order.push_back({true, i, block});
  }
  return order;
}

std::vector<Computation> order_of(PlanKind kind, const PlanShape& shape, int rank) {
  switch (kind) {
    case PlanKind::kGpipe: return gpipe_order(shape, rank);
    case PlanKind::kOneForwardOneBackward: return one_forward_one_backward_order(shape, rank);
    case PlanKind::kInterleaved: return interleaved_order(shape, rank);
    case PlanKind::kForward: return forward_order(shape, rank);
  }
  return {};
}

// What a computation needs from another rank, and what it makes for one.
std::vector<Transfer> inputs_of(const Computation& c, const PlanShape& shape) {
  const int p = shape.stages;
  if (c.is_forward && c.block > 0) return {{false, false, c.micro_batch, c.block, (c.block - 1) % p}};
  if (!c.is_forward && c.block + 1 < shape.blocks())
    return {{false, true, c.micro_batch, c.block + 1, (c.block + 1) % p}};
  return {};
}

std::vector<Transfer> outputs_of(const Computation& c, const PlanShape& shape) {
  const int p = shape.stages;
  if (c.is_forward && c.block + 1 < shape.blocks())
    return {{true, false, c.micro_batch, c.block + 1, (c.block + 1) % p}};
  if (!c.is_forward && c.block > 0) return {{true, true, c.micro_batch, c.block, (c.block - 1) % p}};
  return {};
}

StagePlan with_exchanges(const std::vector<Computation>& order, const PlanShape& shape) {
  StagePlan plan;
  std::vector<Transfer> outgoing;
  const auto exchange = [&](const std::vector<Transfer>& incoming) {
    PlanStep step{PlanStep::Kind::kExchange, 0, 0, outgoing};
    step.transfers.insert(step.transfers.end(), incoming.begin(), incoming.end());
    if (!step.transfers.empty()) plan.push_back(std::move(step));
  };
  for (const Computation& c : order) {
    exchange(inputs_of(c, shape));
    plan.push_back({c.is_forward ? PlanStep::Kind::kForward : PlanStep::Kind::kBackward, c.micro_batch, c.block, {}});
    outgoing = outputs_of(c, shape);
  }
  exchange({});
  return plan;
}

}  // namespace

std::string PlanStep::text() const {
  if (kind == Kind::kForward) return concat("forward of micro-batch ", micro_batch, ", block ", block);
  if (kind == Kind::kBackward) return concat("backward of micro-batch ", micro_batch, ", block ", block);
  std::string all = "exchange:";
  for (const Transfer& t : transfers) {
    all += concat(" ", t.is_send ? "send" : "receive", t.is_gradient ? " gradient " : " activation ", t.micro_batch,
                  " of block ", t.block, t.is_send ? " to " : " from ", t.peer, ";");
  }
  return all;
}

std::vector<StagePlan> make_pipeline_plan(PlanKind kind, const PlanShape& shape) {
  CRAM_CHECK(shape.stages >= 1 && shape.virtual_stages >= 1 && shape.micro_batches >= 1, ExitCode::kUsage,
             "a pipeline needs at least one stage, virtual stage and micro-batch");
  CRAM_CHECK(kind == PlanKind::kInterleaved || kind == PlanKind::kForward || shape.virtual_stages == 1,
             ExitCode::kUsage, "parallel.virtual_stages=", shape.virtual_stages, " needs the interleaved schedule");
  CRAM_CHECK(kind != PlanKind::kInterleaved || shape.micro_batches % shape.stages == 0, ExitCode::kUsage,
             "the interleaved schedule needs a multiple of ", shape.stages, " micro-batches (one group a stage), got ",
             shape.micro_batches);
  std::vector<StagePlan> plans;
  for (int rank = 0; rank < shape.stages; ++rank) {
    plans.push_back(with_exchanges(order_of(kind, shape, rank), shape));
  }
  return plans;
}

SimulationResult simulate(const std::vector<StagePlan>& plans, const PlanShape& shape, double forward_s,
                          double backward_s, Sends sends) {
  const std::size_t ranks = plans.size();
  SimulationResult result;
  result.most_in_flight.assign(ranks, 0);
  std::vector<std::size_t> position(ranks, 0);
  std::vector<double> now(ranks, 0);
  std::vector<int> in_flight(ranks, 0);
  // Available data: (is_gradient, micro_batch, consuming or producing block).
  std::vector<std::set<std::tuple<bool, int, int>>> received(ranks);
  std::vector<std::set<std::pair<int, int>>> forwarded(ranks);
  // A transfer that its side has posted: (from, to, is_gradient, micro_batch, block) -> time.
  using Key = std::tuple<int, int, bool, int, int>;
  std::map<Key, double> posted_sends, posted_receives;
  std::vector<bool> has_posted(ranks, false);
  const auto key_of = [](int rank, const Transfer& t) {
    return t.is_send ? Key{rank, t.peer, t.is_gradient, t.micro_batch, t.block}
                     : Key{t.peer, rank, t.is_gradient, t.micro_batch, t.block};
  };
  const auto refuse = [&](std::size_t rank, const std::string& why) {
    result.problem = concat("rank ", rank, ", ", plans[rank][position[rank]].text(), ": ", why);
    return result;
  };
  for (bool moved = true; moved;) {
    moved = false;
    for (std::size_t r = 0; r < ranks; ++r) {
      while (position[r] < plans[r].size()) {
        const PlanStep& step = plans[r][position[r]];
        if (step.kind == PlanStep::Kind::kExchange) {
          if (!has_posted[r]) {
            for (const Transfer& t : step.transfers) {
              auto& posted = t.is_send ? posted_sends : posted_receives;
              if (!posted.emplace(key_of(static_cast<int>(r), t), now[r]).second) return refuse(r, "moved twice");
            }
            has_posted[r] = moved = true;
          }
          double ready = now[r];
          bool complete = true;
          for (const Transfer& t : step.transfers) {
            if (t.is_send && sends == Sends::kInBackground) continue;
            const auto& other_side = t.is_send ? posted_receives : posted_sends;
            const auto other = other_side.find(key_of(static_cast<int>(r), t));
            complete = complete && other != other_side.end();
            if (other != other_side.end()) ready = std::max(ready, other->second);
          }
          if (!complete) break;  // the peer is not there yet
          for (const Transfer& t : step.transfers) {
            if (!t.is_send) received[r].insert({t.is_gradient, t.micro_batch, t.block});
          }
          now[r] = ready;
          has_posted[r] = false;
        } else if (step.kind == PlanStep::Kind::kForward) {
          if (step.block > 0 && shape.stages > 1 && received[r].count({false, step.micro_batch, step.block}) == 0) {
            return refuse(r, "its input was not received");
          }
          if (!forwarded[r].insert({step.micro_batch, step.block}).second) return refuse(r, "runs twice");
          now[r] += forward_s;
          result.most_in_flight[r] = std::max(result.most_in_flight[r], ++in_flight[r]);
        } else {
          if (forwarded[r].erase({step.micro_batch, step.block}) == 0) return refuse(r, "its forward has not run");
          if (step.block + 1 < shape.blocks() && shape.stages > 1 &&
              received[r].count({true, step.micro_batch, step.block + 1}) == 0) {
            return refuse(r, "its gradient was not received");
          }
          now[r] += backward_s;
          --in_flight[r];
        }
        ++position[r];
        moved = true;
      }
    }
  }
  for (std::size_t r = 0; r < ranks; ++r) {
    if (position[r] < plans[r].size())
      result.problem += concat("rank ", r, " waits at ", plans[r][position[r]].text(), "\n");
    if (position[r] == plans[r].size() && in_flight[r] != 0) result.problem += concat("rank ", r, " lacks backwards\n");
    result.makespan = std::max(result.makespan, now[r]);
  }
  for (const auto& [key, time] : posted_sends) {
    if (posted_receives.count(key) == 0)
      result.problem += concat("a message to rank ", std::get<1>(key), " is never received\n");
  }
  result.finished = result.problem.empty();
  return result;
}

}  // namespace cram
