// `cram_data verify` and `cram_data inspect`: looking at prepared folders.
#pragma once

#include <cstdint>
#include <string>

namespace cram {

/// Checks every file of a tokenizer folder or a prepared folder, and every id of every row. Prints what it found;
/// Error(kData) with one line a fault.
void verify_folder(const std::string& folder);

struct InspectSettings {
  std::string folder;
  std::int64_t samples = 5;
  std::string split = "train";
  bool masked = false;  ///< also show each row as the model would see it
  double mask_rate = 0.25;
  std::uint64_t seed = 0;  ///< of the choice of rows, and of the masks
};

/// Prints what the folder is and some rows, decoded; of a tokenizer folder some pieces.
void inspect_folder(const InspectSettings& settings);

}  // namespace cram
