// What every door is tested with: a test's own row is parsed as an option, trained in layouts, and planned.
#pragma once

#include <set>

#include "parallel/training_support.h"
#include "support/expect_error.h"
#include "train/run_plan.h"

namespace cram::test {

/// A small run of two steps with these options, over the same batch, whose loss must fall.
inline TrainingSetup door_setup(std::vector<std::string> options, Layout layout = {}, bool sequence_parallel = false) {
  TrainingSetup setup;
  setup.model = model_of(2, 16, 2, 24, 37, 8);
  setup.steps = 2;
  setup.batch_size = 12;
  setup.layout = layout;
  setup.sequence_parallel = sequence_parallel;
  setup.rows = [](const ModelConfig& model, std::int64_t first, std::int64_t rows) {
    return Rows::batch(model, first % 12, rows);
  };
  setup.options = std::move(options);
  return setup;
}

/// The plan of a dry run says what the ranks of a finished run have allocated.
inline void expect_planned(const TrainingSetup& setup, const TrainingResult& result) {
  const Config config = training_config(setup);
  const RunPlanned plan = plan_run(config, setup.layout, setup.batch_size, /*masked_per_row=*/1);
  for (int stage = 0; stage < setup.layout.pipeline; ++stage) {
    const StagePlanned& planned = plan.stages[static_cast<std::size_t>(stage)];
    const RankSizes& first = result.sizes.at(rank_of(setup.layout, {0, 0, stage}));
    EXPECT_EQ(planned.parameters, first.parameters) << setup.text() << ", stage " << stage;
    EXPECT_EQ(planned.weight_bytes, first.weights) << setup.text() << ", stage " << stage;
    EXPECT_EQ(planned.gradient_bytes, first.gradients) << setup.text() << ", stage " << stage;
    double largest = 0;
    for (int d = 0; d < setup.layout.data; ++d) {
      const RankSizes& sizes = result.sizes.at(rank_of(setup.layout, {0, d, stage}));
      largest = std::max(largest, sizes.masters + sizes.states);
    }
    EXPECT_EQ(planned.state_bytes, largest) << setup.text() << ", stage " << stage;
  }
  if (setup.layout.world_size() == 1) {
    EXPECT_EQ(plan.stages[0].parameters, parameter_count(config.model, config.train.objective));
  }
}

/// Trains in every one of the layouts: losses, norms, gradients, weights and states are the first's, which is one rank;
/// and all are planned right. Returns the first's.
inline TrainingResult expect_like_one_rank(const std::vector<TrainingSetup>& setups) {
  TrainingResult one;
  for (std::size_t i = 0; i < setups.size(); ++i) {
    const TrainingSetup& setup = setups[i];
    TrainingResult found = train(setup);
    for (const std::string& message : found.messages) EXPECT_EQ(message, "") << setup.text();
    if (!found.fine()) return one;
    expect_planned(setup, found);
    if (i == 0) {
      one = std::move(found);
      EXPECT_EQ(setup.layout.world_size(), 1);
      EXPECT_LT(one.losses.back(), one.losses.front());
      continue;
    }
    EXPECT_TRUE(found.norms_agree) << setup.text();
    EXPECT_LE(worst_relative(one.losses, found.losses), 1e-12) << setup.text();
    EXPECT_LE(worst_relative(one.norms, found.norms), 1e-10) << setup.text();
    EXPECT_LE(worst_norm_error(one.first_gradients, found.first_gradients).first, 1e-10) << setup.text();
    EXPECT_LE(worst_norm_error(one.final, found.final).first, 1e-9) << setup.text();
    EXPECT_EQ(one.states.size(), found.states.size()) << setup.text();
    for (const auto& [name, tensors] : one.states) {
      EXPECT_LE(worst_norm_error(tensors, found.states[name]).first, 1e-9) << setup.text() << ", " << name;
    }
  }
  return one;
}

/// The written backward pass of a whole model in fp64 against central differences of its loss sum, at some elements of
/// every parameter.
inline void expect_gradients_are_differences(const ModelConfig& config, const std::string& objective,
                                             const Batch& batch) {
  ParameterStore store;
  cram::Model model(config, store, objective);
  store.allocate(Precision::kFp64, at::kCPU, adam_states());
  store.initialize(2);
  for (ParamId id = 0; id < store.size(); ++id) store.master(id).mul_(3);  // so that nothing is nearly linear
  (void)forward_backward(model, batch);
  std::vector<at::Tensor> gradients;
  for (ParamId id = 0; id < store.size(); ++id) gradients.push_back(store.grad(id).clone().view({-1}));
  const auto loss = [&] { return forward_backward(model, batch).item<double>(); };
  constexpr double kStep = 1e-5;
  for (ParamId id = 0; id < store.size(); ++id) {
    const at::Tensor flat = store.master(id).view({-1});
    const double scale = gradients[id].abs().max().item<double>();
    EXPECT_GT(scale, 0) << store.spec(id).name;
    for (std::int64_t i = 0; i < flat.numel(); i += std::max<std::int64_t>(1, flat.numel() / 6)) {
      const double kept = flat[i].item<double>();
      flat[i].fill_(kept + kStep);
      const double above = loss();
      flat[i].fill_(kept - kStep);
      const double below = loss();
      flat[i].fill_(kept);
      EXPECT_NEAR(gradients[id][i].item<double>() / scale, (above - below) / (2 * kStep) / scale, 1e-6)
          << store.spec(id).name << ", element " << i;
    }
  }
}

/// The option takes no such value; after `add` it does.
inline void expect_legal_through_the_table(const std::string& key, const std::string& name,
                                           const std::function<void()>& add) {
  const auto parse = [&] {
    OptionTable table;
    Config config;
    add_train_options(table, config);
    table.apply_override(key + "=" + name);
    return table.at(key).value_text();
  };
  expect_error(
      ExitCode::kUsage, {key, name, "is not one of"}, [&] { (void)parse(); }, key);
  add();
  EXPECT_EQ(parse(), name);
}

}  // namespace cram::test
