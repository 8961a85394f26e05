// Bytes that ranks send for training: as planned by the formulas (run_plan) and as counted.
#pragma once

#include <cstdint>
#include <map>

#include "parallel/mesh.h"
#include "train/train_config.h"

namespace cram {

/// Bytes that all ranks together send, counted as CommunicationTrace counts them.
struct Traffic {
  double tensor =
      0;  ///< two sums forward and two backward a layer, embedding, head, loss, gradients of shared rows, ids
  double pipeline = 0;  ///< activations and their gradients between stages
  double data = 0;      ///< gradients, and weights under ZeRO
  double tied = 0;      ///< gradient of the embedding that two stages hold

  [[nodiscard]] double total() const { return tensor + pipeline + data + tied; }
};

/// Counts what the mesh's groups send in steps (not in evaluations and saves), beside what the formulas say.
class TrafficMeter {
 public:
  /// Both must outlive it.
  TrafficMeter(const Mesh& mesh, const Config& config, std::int64_t masked_per_row)
      : mesh_(mesh), config_(config), masked_per_row_(masked_per_row) {}

  void begin_step();
  void end_step(std::int64_t batch_size);

  struct Totals {
    Traffic sent, planned;
  };
  /// Of all ranks since the start. Collective over the world.
  [[nodiscard]] Totals totals() const;

 private:
  const Mesh& mesh_;
  const Config& config_;
  std::int64_t masked_per_row_;
  Traffic sent_, planned_;
  std::map<std::int64_t, Traffic> plans_;  // by batch size
};

}  // namespace cram
