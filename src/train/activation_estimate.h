// How much memory a rank's activations take at once: what the layers keep for the backward pass, and what is made and
// dropped on the way. For plans; the peak of the programs' allocator is the oracle (activation_estimate_test).
#pragma once

#include <vector>

#include "model/stage_split.h"
#include "parallel/mesh.h"
#include "train/train_config.h"

namespace cram {

/// What a rank has to hold at its schedule's peak.
struct ActivationLoad {
  std::vector<BlockRange> blocks;  ///< of this rank
  int most_in_flight = 1;          ///< micro-batches (of a block) whose backward pass is still to come
  double terms_a_row = 0;          ///< of the objective (masked tokens)
};

/// Bytes, an estimate; 0 without blocks. Formula: Korthikanti et al. 2022 (section 4) counts what a layer keeps; here
/// for this encoder's own layers, with the temporaries of the kernels that this build has for the shape. `config` is
/// resolved, device and precision included.
[[nodiscard]] double activation_bytes(const Config& config, const Layout& layout, const ActivationLoad& load);

}  // namespace cram
