// Bytes that ranks send for training: as planned by the formulas (run_plan) and as counted.
#pragma once

#include <cstdint>
#include <map>

#include "parallel/mesh.h"
#include "run/metrics.h"
#include "train/train_config.h"

namespace cram {

/// Counts what the mesh's groups send in steps (not in evaluations and saves), beside what the formulas say.
class TrafficMeter {
 public:
  /// Both must outlive it.
  TrafficMeter(const Mesh& mesh, const Config& config, std::int64_t masked_per_row)
      : mesh_(mesh), config_(config), masked_per_row_(masked_per_row) {}

  void begin_step();
  void end_step(std::int64_t batch_size);

  /// Of all ranks since the start. Collective over the world.
  [[nodiscard]] TrafficTotals totals() const;

 private:
  const Mesh& mesh_;
  const Config& config_;
  std::int64_t masked_per_row_;
  Traffic sent_, planned_;
  std::map<std::int64_t, Traffic> plans_;  // by batch size
};

}  // namespace cram
