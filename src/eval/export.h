// Export of a trained model for other programs. A format is one function and one row of the table.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/table.h"
#include "data/shard_set.h"
#include "eval/loaded_model.h"

namespace cram {

struct ExportFormat {
  std::string name;
  std::string help;  ///< one line
  /// Writes into the folder, which exists: every file whole or not at all.
  void (*write)(LoadedModel&, const std::string& output);
  /// Throws Error(kUsage) where the format cannot hold that model, before anything is written; null: it holds all.
  void (*check)(const LoadedModel&) = nullptr;
};

/// The legal values of --format.
[[nodiscard]] Table<ExportFormat>& export_formats();

/// What cram_export is asked for.
struct ExportRequest {
  std::string checkpoint;  ///< as load_model takes it
  std::string output;      ///< folder
  std::string format = "cramming";
  std::optional<std::int64_t> sample_rows = {};  ///< also export_sample of so many rows
  std::string shards = {};                       ///< for them; "" = those that the run was trained on
};

/// Loads, checks all of the request, then writes. Throws Error(kUsage) for what cannot be had; nothing is written then.
void export_model(const ExportRequest& request);

/// `output`/sample.safetensors: input_ids [N,S] (int64, validation rows, unmasked) and this program's fp32 logits
/// [N,S,V], so that a reader elsewhere can compare.
void export_sample(LoadedModel& model, ShardSet& validation, std::int64_t rows, const std::string& output);

}  // namespace cram
