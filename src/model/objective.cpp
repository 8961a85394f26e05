#include "model/objective.h"

#include "model/masked_lm.h"

namespace cram {

Table<ObjectiveRow>& objectives() {
  static Table<ObjectiveRow> table("objective", {{"mlm", make_masked_lm, masked_lm_flops}});
  return table;
}

}  // namespace cram
