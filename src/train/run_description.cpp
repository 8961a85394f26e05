#include "train/run_description.h"

#include <algorithm>
#include <sstream>
#include <vector>

#include "base/check.h"
#include "base/log.h"
#include "base/version.h"
#include "model/stage_split.h"
#include "parallel/agreement.h"

namespace cram {
namespace {

constexpr ExitCode kBad = ExitCode::kUsage;

// A value the shards decide: taken from them when left out, refused when it differs.
void settle(std::int64_t& value, std::int64_t from_shards, const char* key, const DataShape& data) {
  if (value == 0) value = from_shards;
  CRAM_CHECK(value == from_shards, kBad, key, "=", value, ", but ", data.folder, " has ", from_shards,
             " (tokenizer digest ", data.tokenizer_digest, "); leave ", key, " out or prepare the data anew");
}

// Sequence parallelism cuts the rows of a micro-batch; better refused here than in the first step.
void check_rows_can_be_shared(const Config& config, const Layout& layout) {
  const std::int64_t rows = config.train.micro_batch_size * config.model.seq_length;
  CRAM_CHECK(!config.parallel.sequence_parallel || rows % layout.tensor == 0, kBad,
             "parallel.sequence_parallel: ", rows,
             " tokens of a micro-batch (train.micro_batch_size=", config.train.micro_batch_size, " x ",
             config.model.seq_length, ") cannot be shared out to ", layout.tensor,
             " tensor ranks; choose a micro-batch that can");
}

std::vector<std::string> fields_of(const std::string& line) {
  std::vector<std::string> fields;
  std::istringstream text(line);
  for (std::string field; std::getline(text, field, '\t');) fields.push_back(field);
  return fields;
}

std::map<std::string, std::string> lines_of(const std::string& text) {
  std::map<std::string, std::string> values;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    values[line.substr(0, line.find('\t'))] = line.substr(line.find('\t') + 1);
  }
  return values;
}

}  // namespace

DeviceChoice agree_on_device(const DeviceChoice& proposal, Communicator& world) {
  const std::string kind = proposal.device.is_cuda() ? "cuda" : "cpu";
  const std::vector<std::string> all =
      gather_text_to_root(world, concat(kind, "\t", precision_name(proposal.precision), "\t", proposal.threads, "\t",
                                        proposal.host, "\t", proposal.precision_reason));
  int threads = proposal.threads;
  on_root(world, [&] {
    std::string differences;
    int most = 0;
    std::size_t fewest_at = 0;
    const std::vector<std::string> first = fields_of(all[0]);
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      const std::vector<std::string> own = fields_of(all[rank]);
      const int proposed = static_cast<int>(parse_integer(own[2], "proposed threads"));
      most = std::max(most, proposed);
      if (proposed < threads) fewest_at = rank;
      threads = std::min(threads, proposed);
      const auto compare = [&](const char* key, std::size_t field) {
        if (own[field] == first[field]) return;
        differences += concat("\n  ", key, "=auto is ", own[field], " on rank ", rank, " (", own[3], ": ", own[4],
                              ") and ", first[field], " on rank 0 (", first[3], ": ", first[4], ")");
      };
      compare("run.device", 0);
      compare("train.precision", 1);
    }
    CRAM_CHECK(differences.empty(), kBad, "the ranks cannot train together:", differences,
               "\ngive the value that all of them can do, for example train.precision=fp32 or run.device=cpu");
    if (most != threads) {
      say("run.threads=0: ", threads, " a rank, the fewest that one can take (rank ", fewest_at, "; others ", most,
          ")");
    }
  });
  DeviceChoice choice = proposal;
  choice.threads = static_cast<int>(broadcast_value(world, threads));
  return choice;
}

RunDescription resolve_run(const Config& given, const Layout& layout, const DataShape& data, const MachinePlace& place,
                           Communicator& world, bool plans) {
  RunDescription run;
  run.layout = layout;
  run.config = resolve_train_config(given, layout);
  Config& config = run.config;
  settle(config.model.vocab_size, data.vocab_size, "model.vocab_size", data);
  settle(config.model.seq_length, data.seq_length, "model.seq_length", data);
  check_model_config(config.model);
  check_tensor_ranks(config.model, layout.tensor);
  (void)split_layers(config.model.layers, layout.pipeline * config.parallel.virtual_stages, config.parallel.split);
  CRAM_CHECK(masked_in_row(config) > 0, kBad, "train.mask_rate=", config.train.mask_rate,
             " masks no token of a row of ", config.model.seq_length, "; the rate must be above ",
             0.5 / static_cast<double>(config.model.seq_length));
  check_rows_can_be_shared(config, layout);
  run.device = agree_on_device(propose_device(config, place, plans), world);
  config.train.precision = precision_name(run.device.precision);
  config.run.device = run.device.device.is_cuda() ? "cuda" : "cpu";
  config.run.threads = run.device.threads;
  run.graph = choose_cuda_graph(config, layout, run.device.device);
  return run;
}

RunDescription with_micro_batch(const RunDescription& run, std::int64_t rows) {
  RunDescription other = run;
  other.config.train.micro_batch_size = rows;
  check_rows_can_be_shared(other.config, other.layout);
  return other;
}

std::map<std::string, std::string> settings_of(const Config& config) {
  Config copy = config;  // the table points to what it may change
  OptionTable table;
  add_train_options(table, copy);
  return table.values();
}

std::map<std::string, std::string> resolved_values(const OptionTable& given, const Config& resolved) {
  std::map<std::string, std::string> changed = settings_of(resolved);
  std::erase_if(changed, [&](const auto& entry) { return given.at(entry.first).value_text() == entry.second; });
  return changed;
}

void check_started_alike(Communicator& world, const OptionTable& options, const std::string& data_digest) {
  std::string asked = concat("program\t", version(), " ", build_description(), "\ndata digest\t", data_digest, "\n");
  for (const auto& [key, value] : options.values()) asked += concat(key, "\t", value, "\n");
  const std::vector<std::string> all = gather_text_to_root(world, asked);
  on_root(world, [&] {
    const std::map<std::string, std::string> first = lines_of(all[0]);
    std::string differences;
    for (std::size_t rank = 1; rank < all.size(); ++rank) {
      if (all[rank] == all[0]) continue;
      for (const auto& [key, value] : lines_of(all[rank])) {
        const auto expected = first.find(key);
        if (expected != first.end() && expected->second == value) continue;
        differences += concat("\n  ", key, ": rank ", rank, " has ", value, ", rank 0 ",
                              expected == first.end() ? "nothing" : expected->second);
      }
    }
    CRAM_CHECK(differences.empty(), kBad, "the ranks were not started alike:", differences,
               "\nstart all of them with one command, one program and one data folder");
  });
}

}  // namespace cram
