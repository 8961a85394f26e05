#include "model/model_config.h"

#include <utility>

#include "model/linear.h"
#include "model/objective.h"
#include "model/positions.h"

namespace cram {

void add_model_options(OptionTable& table, ModelConfig& config) {
  constexpr double kMany = 1e6;
  table.add("model.layers", &config.layers, "transformer layers").range(1, kMany).also_called({"num_layers", "depth"});
  table.add("model.hidden", &config.hidden, "width of the residual stream")
      .range(1, kMany)
      .also_called({"hidden_size", "d_model", "dim"});
  table.add("model.heads", &config.heads, "attention heads").range(1, kMany).also_called({"num_heads", "n_head"});
  table.add("model.ffn", &config.ffn, "rows of the FFN's input matrix; half of them are the gate")
      .range(2, kMany)
      .also_called({"intermediate_size", "ffn_size"});
  table.add("model.vocab_size", &config.vocab_size, "tokens; 0 takes the shards' value").range(0, 16e6);
  table.add("model.seq_length", &config.seq_length, "tokens of a row; 0 takes the shards' value").range(0, kMany);
  table.add("model.dropout", &config.dropout, "dropout in pretraining; the recipe uses none").range(0, 0.99);
  table.add("model.preset", &config.preset, "architecture").choices({"crammed-bert"});
  table.add("model.positions", &config.positions, "how the model knows where a token stands")
      .choices(position_forms().names())
      .added_later();
  table.add("model.structure", &config.structure, "structure of the linear layers")
      .choices(linear_structures().names())
      .added_later();
  table
      .add("model.recompute", &config.recompute,
           "activations made again for the backward pass: none, attention probabilities (selective), all of a layer")
      .choices({"none", "selective", "layer"})
      .free_on_resume();
}

void check_model_config(const ModelConfig& config) {
  constexpr ExitCode kBad = ExitCode::kUsage;
  for (const auto& [key, size] : {std::pair{"model.layers", config.layers}, std::pair{"model.hidden", config.hidden},
                                  std::pair{"model.heads", config.heads}, std::pair{"model.ffn", config.ffn}}) {
    CRAM_CHECK(size > 0, kBad, key, "=", size, " must be positive");
  }
  CRAM_CHECK(config.hidden % config.heads == 0, kBad, "model.heads=", config.heads,
             " does not divide model.hidden=", config.hidden, "; choose a divisor");
  CRAM_CHECK(config.ffn % 2 == 0, kBad, "model.ffn=", config.ffn, " must be even: half of its rows are the gate");
  CRAM_CHECK(config.vocab_size > 5, kBad, "model.vocab_size=", config.vocab_size,
             " must exceed the 5 special tokens; leave it out to take the shards' value");
  CRAM_CHECK(config.seq_length > 0, kBad, "model.seq_length=", config.seq_length, " must be positive");
  const PositionRow& positions = position_forms().at(config.positions);
  if (positions.check != nullptr) positions.check(config);
}

void check_tensor_ranks(const ModelConfig& config, int ranks) {
  const auto legal = [&](std::int64_t size) { return config.heads % size == 0 && config.ffn / 2 % size == 0; };
  if (legal(ranks)) return;
  std::string sizes;
  for (std::int64_t size = 1; size <= config.heads; ++size) {
    if (legal(size)) sizes += concat(sizes.empty() ? "" : ", ", size);
  }
  fail(ExitCode::kUsage, "parallel.tensor=", ranks, " cannot share model.heads=", config.heads,
       " and model.ffn=", config.ffn, "; legal sizes: ", sizes);
}

double layer_flops_per_token(const ModelConfig& c) {
  // query_key_value, dense, dense_in, dense_out
  const std::pair<std::int64_t, std::int64_t> linears[] = {
      {c.hidden, 3 * c.hidden}, {c.hidden, c.hidden}, {c.hidden, c.ffn}, {c.ffn / 2, c.hidden}};
  double flops = 4 * static_cast<double>(c.seq_length) * static_cast<double>(c.hidden);
  for (const auto& [in, out] : linears) flops += linear_flops(c.structure, {"", in, out});
  return 3 * flops;
}

double term_flops(const ModelConfig& c, const std::string& objective) {
  const ObjectiveRow& row = objectives().at(objective);
  return row.flops != nullptr ? 3 * row.flops(c) : 0;
}

double train_flops_per_token(const ModelConfig& c, std::int64_t terms_per_row, const std::string& objective) {
  const double terms = static_cast<double>(terms_per_row) / static_cast<double>(c.seq_length);
  return static_cast<double>(c.layers) * layer_flops_per_token(c) + terms * term_flops(c, objective);
}

}  // namespace cram
