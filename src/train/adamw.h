// AdamW (Loshchilov & Hutter 2019) as a row of the optimizers.
#pragma once

#include "train/optimizer.h"

namespace cram {

[[nodiscard]] OptimizerRow adamw_row();

}  // namespace cram
