#include "train/run_plan.h"

#include <torch/types.h>

#include <algorithm>
#include <cstdio>
#include <memory>

#include "base/check.h"
#include "model/model.h"
#include "parallel/pipeline_plan.h"
#include "run/metrics.h"
#include "train/activation_estimate.h"
#include "train/micro_steps.h"
#include "train/optimizer.h"

namespace cram {
namespace {

// A rank's part of the model with tensors that have sizes but no memory.
struct PlannedRank {
  std::unique_ptr<Communicator> tensor;
  ParameterStore store;
  std::unique_ptr<Model> model;

  PlannedRank(const Config& config, const Layout& layout, int pp_rank, int dp_rank)
      : tensor(make_planned_communicator(0, layout.tensor, "tensor")) {
    model = std::make_unique<Model>(config.model, store, place_in(config, *tensor, pp_rank, layout.pipeline),
                                    config.train.objective);
    store.allocate(parse_precision(config.train.precision), at::Device(at::kMeta), state_layout(config.train.optimizer),
                   config.parallel.zero > 0 ? Partition{dp_rank, layout.data} : Partition{});
  }

  [[nodiscard]] double state_bytes() const {
    double bytes = 0;
    for (const FlatBuffers& b : store.buffers()) {
      bytes += static_cast<double>(b.state_bytes());
      if (!b.master.is_same(b.working)) bytes += static_cast<double>(b.master.nbytes());
    }
    return bytes;
  }
};

// Parts of whole matrices are of unequal size: the largest of all data ranks' counts.
double largest_state_bytes(const Config& config, const Layout& layout, int pp_rank, const PlannedRank& first) {
  double largest = first.state_bytes();
  const std::vector<FlatBuffers>& buffers = first.store.buffers();
  const bool unequal = std::any_of(buffers.begin(), buffers.end(),
                                   [](const FlatBuffers& b) { return b.shared_out && b.traits.whole_matrices; });
  for (int d = 1; unequal && d < layout.data; ++d) {
    largest = std::max(largest, PlannedRank(config, layout, pp_rank, d).state_bytes());
  }
  return largest;
}

double stage_flops(const std::vector<BlockRange>& blocks, const Config& config, double tokens, double terms) {
  const double head = term_flops(config.model, config.train.objective) * terms;
  double flops = 0;
  for (const BlockRange& block : blocks) {
    flops += static_cast<double>(block.layers()) * layer_flops_per_token(config.model) * tokens;
    if (block.head) flops += head;
  }
  return flops;
}

Traffic plan_traffic(const Config& config, const Layout& layout, const std::vector<std::unique_ptr<PlannedRank>>& ranks,
                     double tokens, double masked) {
  const ModelConfig& m = config.model;
  const Precision precision = parse_precision(config.train.precision);
  const auto working = static_cast<double>(c10::elementSize(working_type(precision)));
  const auto master = static_cast<double>(c10::elementSize(master_type(precision)));
  const double t = layout.tensor, d = layout.data, h = static_cast<double>(m.hidden);
  const double blocks = layout.pipeline * static_cast<double>(config.parallel.virtual_stages);
  const bool shared_rows = config.parallel.sequence_parallel;
  Traffic traffic;
  // Of one all-reduce of all tokens' rows, which is also a reduce-scatter and an all-gather: 2(t-1)/t a rank, t ranks.
  const double row_sum = 2 * (t - 1) * tokens * h * working;
  const double layer_sums = m.recompute == "layer" ? 6 : 4;
  traffic.tensor = static_cast<double>(m.layers) * layer_sums * row_sum + row_sum;
  traffic.tensor += 2 * (t - 1) * masked * h * working;  // input gradient of the decoder
  // Each rank gathers two values a position, in fp32 at least.
  traffic.tensor += t * 2 * (t - 1) * masked * (precision == Precision::kFp64 ? 8 : 4);
  if (shared_rows) traffic.tensor += row_sum / 2;  // all rows, for picking the masked ones
  // The rank of a tensor group that reads sends the ids, 4 bytes each, on the first and on the last stage.
  if (layout.tensor > 1) traffic.tensor += (layout.pipeline > 1 ? 2 : 1) * tokens * 4;
  traffic.pipeline = 2 * (blocks - 1) * tokens * h * working * (shared_rows ? 1 : t);
  if (layout.pipeline == 1) traffic.pipeline = 0;
  for (const std::unique_ptr<PlannedRank>& rank : ranks) {
    for (const FlatBuffers& b : rank->store.buffers()) {
      const double gradients = static_cast<double>(b.numel) * master;
      const double weights = static_cast<double>(b.working.nbytes());
      if (b.traits.partial) traffic.tensor += d * 2 * (t - 1) * gradients;
      if (b.traits.tied) traffic.tied += d * t * gradients;
      // Sums on every rank, or (ZeRO-1) each rank's part and its weights back; of whole matrices both in full.
      const double sums = b.shared_out && !b.traits.whole_matrices ? gradients : 2 * gradients;
      traffic.data += t * (d - 1) * (sums + (b.shared_out ? weights : 0));
    }
  }
  return traffic;
}

std::string percent(double fraction) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f %%", 100 * fraction);
  return text;
}

std::string bytes_text(double bytes) { return format_count(bytes) + "B"; }

}  // namespace

RunPlanned plan_run(const Config& config, const Layout& layout, std::int64_t batch_size, std::int64_t masked_per_row,
                    std::int64_t masked) {
  const ModelConfig& m = config.model;
  RunPlanned plan;
  plan.batch_size = batch_size;
  plan.micro_batches = batch_size / (config.train.micro_batch_size * layout.data);
  const double tokens = static_cast<double>(batch_size * m.seq_length);
  const auto masked_tokens = static_cast<double>(masked > 0 ? masked : batch_size * masked_per_row);
  const PlanShape shape{layout.pipeline, static_cast<int>(config.parallel.virtual_stages),
                        static_cast<int>(plan.micro_batches)};
  const SimulationResult simulated =
      simulate(make_pipeline_plan(plan_kind(config.parallel), shape), shape, /*forward_s=*/1, /*backward_s=*/2);
  plan.bubble = simulated.bubble(3.0 * shape.micro_batches * shape.virtual_stages);
  std::vector<std::unique_ptr<PlannedRank>> ranks;
  for (int stage = 0; stage < layout.pipeline; ++stage) {
    ranks.push_back(std::make_unique<PlannedRank>(config, layout, stage, 0));
    const PlannedRank& rank = *ranks.back();
    StagePlanned planned;
    for (int b = stage; b < rank.model->encoder().blocks(); b += layout.pipeline) {
      planned.blocks.push_back(rank.model->encoder().ranges()[static_cast<std::size_t>(b)]);
    }
    for (ParamId id = 0; id < rank.store.size(); ++id) planned.parameters += rank.store.local_numel(id);
    for (const FlatBuffers& b : rank.store.buffers()) {
      planned.weight_bytes += static_cast<double>(b.working.nbytes());
      planned.gradient_bytes +=
          static_cast<double>(b.grad.nbytes() + (b.owned_grad.is_alias_of(b.grad) ? 0 : b.owned_grad.nbytes()));
    }
    planned.state_bytes = largest_state_bytes(config, layout, stage, rank);
    // One stage runs micro-batch after micro-batch.
    planned.most_in_flight = layout.pipeline == 1 ? 1 : simulated.most_in_flight[static_cast<std::size_t>(stage)];
    planned.activation_bytes = activation_bytes(config, layout,
                                                {.blocks = planned.blocks,
                                                 .most_in_flight = planned.most_in_flight,
                                                 .terms_a_row = masked_tokens / static_cast<double>(batch_size)});
    planned.flops_per_step = stage_flops(planned.blocks, config, tokens, masked_tokens) / (layout.data * layout.tensor);
    plan.stages.push_back(std::move(planned));
  }
  plan.traffic = plan_traffic(config, layout, ranks, tokens, masked_tokens);
  return plan;
}

std::string describe_plan(const RunPlanned& plan, const Config& config, const Layout& layout) {
  std::string text = concat("layout ", layout.text(), ": ", layout.world_size(), " ranks = ", layout.pipeline,
                            " stages x ", layout.data, " data x ", layout.tensor, " tensor; rank = tp + ",
                            layout.tensor, " x (dp + ", layout.data, " x pp)");
  const auto ranks_text = [&](Axis axis) {
    const std::vector<int> group = group_ranks(layout, axis, 0);
    std::string ranks;
    for (std::size_t i = 0; i < group.size(); ++i) {
      constexpr std::size_t kShown = 16;
      if (group.size() > kShown && i >= 3 && i + 1 < group.size()) {
        if (i == 3) ranks += " ...";
        continue;
      }
      ranks += concat(ranks.empty() ? "" : " ", group[i]);
    }
    return ranks;
  };
  text += concat("\ngroups of rank 0: tensor {", ranks_text(Axis::kTensor), "}, data {", ranks_text(Axis::kData),
                 "}, pipeline {", ranks_text(Axis::kPipeline), "}");
  for (std::size_t s = 0; s < plan.stages.size(); ++s) {
    const StagePlanned& stage = plan.stages[s];
    std::string blocks;
    for (const BlockRange& block : stage.blocks) blocks += concat(blocks.empty() ? "" : " | ", block.text());
    text += concat("\nstage ", s, ": ", blocks, ": ", format_grouped(stage.parameters), " parameters a rank; weights ",
                   bytes_text(stage.weight_bytes), ", gradients ", bytes_text(stage.gradient_bytes), ", state ",
                   bytes_text(stage.state_bytes), ", activations about ", bytes_text(stage.activation_bytes), " (",
                   stage.most_in_flight, " in flight); ", format_count(stage.flops_per_step), "FLOP a step and rank");
  }
  text += concat("\na step: ", plan.batch_size, " rows in ", plan.micro_batches, " micro-batches of ",
                 config.train.micro_batch_size, " a data rank; bubble ", percent(plan.bubble), " of the ideal time, ",
                 percent(plan.bubble / (1 + plan.bubble)), " of the whole");
  const Traffic& t = plan.traffic;
  return text + concat("\nsent a step by all ranks: ", bytes_text(t.total()), " (tensor ", bytes_text(t.tensor),
                       ", pipeline ", bytes_text(t.pipeline), ", data ", bytes_text(t.data), ", tied embedding ",
                       bytes_text(t.tied), ")");
}

}  // namespace cram
