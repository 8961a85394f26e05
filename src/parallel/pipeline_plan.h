// Pipeline schedules as data: what a rank computes and exchanges, in order, and a simulator that proves a plan before
// anything runs it.
//
// A plan is a pure function of its shape. Compute orders: GPipe (Huang et al. 2019), 1F1B and its interleaved form
// (Narayanan et al. 2021, section 2.2). Communication follows from them: between two computations a rank starts to send
// what the first made and receives what the second needs, in one exchange.
//
// Legend: p stages (ranks), v chunks a rank (virtual stages), m micro-batches. Chunk c of rank r is layer block c * p +
// r.
#pragma once

#include <string>
#include <vector>

namespace cram {

struct PlanShape {
  int stages = 1;          ///< p
  int virtual_stages = 1;  ///< v
  int micro_batches = 1;   ///< m

  [[nodiscard]] int blocks() const { return stages * virtual_stages; }
};

/// kForward: no backward passes, any number of virtual stages: evaluation.
enum class PlanKind { kGpipe, kOneForwardOneBackward, kInterleaved, kForward };

struct Transfer {
  bool is_send = false;
  bool is_gradient = false;  ///< of the activation that the same block's forward received
  int micro_batch = 0;
  int block = 0;  ///< that consumes an activation, or produced a gradient's activation: the later one of the two
  int peer = 0;   ///< rank
  bool operator==(const Transfer&) const = default;
};

struct PlanStep {
  enum class Kind { kForward, kBackward, kExchange } kind = Kind::kForward;
  int micro_batch = 0;              ///< of a computation
  int block = 0;                    ///< of a computation
  std::vector<Transfer> transfers;  ///< of an exchange: all at once

  [[nodiscard]] std::string text() const;
};

using StagePlan = std::vector<PlanStep>;

/// Plans of all ranks. Throws Error(kUsage) naming the numbers for a shape the kind cannot have: interleaved needs m to
/// be a multiple of p; GPipe and 1F1B have v = 1.
[[nodiscard]] std::vector<StagePlan> make_pipeline_plan(PlanKind kind, const PlanShape& shape);

struct SimulationResult {
  bool finished = false;            ///< false: a deadlock, or a computation before its input
  std::string problem;              ///< what every rank waits for
  double makespan = 0;              ///< with free communication
  std::vector<int> most_in_flight;  ///< per rank: forwards whose backward is still to come, at most
  [[nodiscard]] double bubble(double ideal) const { return makespan / ideal - 1; }  ///< fraction of ideal time
};

/// When an exchange is over: with its receives (sends go on in the background until their receiver is there, which is
/// how the interleaved schedule must be run), or with its sends, too (GPipe and 1F1B work even so).
enum class Sends { kInBackground, kBlocking };

/// Runs the plans against each other; a message moves when both sides have come to its exchange, nothing is buffered.
/// `forward_s` and `backward_s` are the times of one block.
[[nodiscard]] SimulationResult simulate(const std::vector<StagePlan>& plans, const PlanShape& shape, double forward_s,
                                        double backward_s, Sends sends = Sends::kInBackground);

}  // namespace cram
