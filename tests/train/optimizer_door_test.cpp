// A new optimizer is one row: momentum, which any rank computes from what it owns, and one that needs matrices whole,
// made here, trained in layouts, and saved and loaded by the names of their states.
#include <ATen/Parallel.h>

#include "support/temporary_folder.h"
#include "train/door_support.h"

namespace cram::test {
namespace {

class Momentum final : public UpdateRule {
 public:
  explicit Momentum(const OptimizerSettings& settings) : settings_(settings) {}

  void update(const std::vector<UpdatePiece>& pieces, const Update& update) override {
    for (const UpdatePiece& piece : pieces) {
      piece.states[0].mul_(settings_.beta1).add_(piece.grad, update.grad_scale);
      if (piece.traits->decay) piece.master.mul_(1 - update.lr * settings_.weight_decay);
      piece.master.add_(piece.states[0], -update.lr * piece.traits->lr_factor);
      if (piece.working.defined()) piece.working.copy_(piece.master);
      piece.grad.zero_();
    }
  }

 private:
  OptimizerSettings settings_;
};

// Steps of the same length for every matrix of a layer, three times the learning rate; momentum for the rest.
class UnitSteps final : public UpdateRule {
 public:
  explicit UnitSteps(const OptimizerContext& context)
      : rest_(context.settings), beta_(context.settings.beta1), store_(context.store) {}

  void update(const std::vector<UpdatePiece>& pieces, const Update& update) override {
    for (const UpdatePiece& piece : pieces) {
      if (!piece.traits->whole_matrices) {
        rest_.update({piece}, update);
        continue;
      }
      const std::int64_t first = store_.location(piece.parameters.front()).begin;
      for (const ParamId id : piece.parameters) {
        const auto whole = [&](const at::Tensor& flat) {
          return flat.narrow(0, store_.location(id).begin - first, store_.local_numel(id)).view(store_.local_shape(id));
        };
        const at::Tensor momentum = whole(piece.states[0]);
        momentum.mul_(beta_).add_(whole(piece.grad), update.grad_scale);
        whole(piece.master).sub_(momentum / momentum.norm() * (update.lr * piece.traits->lr_factor));
      }
      if (piece.working.defined()) piece.working.copy_(piece.master);
      piece.grad.zero_();
    }
  }

  static void classify(const ParamSpec& spec, ParamClass& traits) {
    if (spec.global_shape.size() != 2 || spec.name.find(".layers.") == std::string::npos) return;
    traits.whole_matrices = true;
    traits.lr_factor = 3;
  }
  static std::vector<std::string> states(const ParamClass& traits) {
    return {traits.whole_matrices ? "matrix_momentum" : "momentum"};
  }

 private:
  Momentum rest_;
  double beta_;
  const ParameterStore& store_;
};

class OptimizerDoor : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    at::set_num_threads(1);
    expect_legal_through_the_table("train.optimizer", "momentum", [] {
      optimizers().add({.name = "momentum",
                        .states = [](const ParamClass&) -> std::vector<std::string> { return {"momentum"}; },
                        .make = [](const OptimizerContext& context) -> std::unique_ptr<UpdateRule> {
                          return std::make_unique<Momentum>(context.settings);
                        }});
    });
    expect_legal_through_the_table("train.optimizer", "unit-steps", [] {
      optimizers().add({.name = "unit-steps",
                        .states = UnitSteps::states,
                        .classify = UnitSteps::classify,
                        .make = [](const OptimizerContext& context) -> std::unique_ptr<UpdateRule> {
                          return std::make_unique<UnitSteps>(context);
                        }});
    });
  }
};

const std::vector<std::string> kNames = {"momentum", "unit-steps"};

// Options that both look at.
std::vector<std::string> options_for(const std::string& name) {
  return {"train.optimizer=" + name, "train.beta1=0.8", "train.weight_decay=0.05", "train.clip=0"};
}

// Three updates of a whole model against the same sums written out for each number.
TEST_F(OptimizerDoor, UpdatesAreThoseOfAHandWrittenLoop) {
  for (const std::string& name : kNames) {
    for (const Precision precision : {Precision::kFp64, Precision::kBf16}) {
      const OptimizerSettings settings{.beta1 = 0.8, .weight_decay = 0.05};
      ParameterStore store;
      const cram::Model model(model_of(1, 16, 2, 24, 37, 8), store);
      store.allocate(precision, at::kCPU, state_layout(name));
      store.initialize(1);
      Optimizer optimizer(name, store, settings, self_mesh());
      std::vector<std::vector<double>> weights, momenta;
      for (ParamId id = 0; id < store.size(); ++id) {
        const at::Tensor master = store.master(id).to(at::kDouble).contiguous();
        weights.emplace_back(master.data_ptr<double>(), master.data_ptr<double>() + master.numel());
        momenta.emplace_back(weights.back().size(), 0.0);
      }
      for (std::int64_t number = 1; number <= 3; ++number) {
        const double lr = 0.1 / static_cast<double>(number), scale = 0.5;
        for (ParamId id = 0; id < store.size(); ++id) {
          const ParamSpec& spec = store.spec(id);
          const bool whole =
              name == "unit-steps" && spec.name.find(".layers.") != std::string::npos && spec.global_shape.size() == 2;
          const at::Tensor gradient =
              at::randn(store.local_shape(id), at::detail::createCPUGenerator(id + 100 * static_cast<ParamId>(number)),
                        at::kDouble);
          store.grad(id).copy_(gradient);
          const double* g = gradient.const_data_ptr<double>();
          double norm = 1, factor = lr;
          for (std::size_t i = 0; i < momenta[id].size(); ++i) momenta[id][i] = 0.8 * momenta[id][i] + scale * g[i];
          if (whole) {
            double sum = 0;
            for (const double m : momenta[id]) sum += m * m;
            norm = std::sqrt(sum);
            factor = 3 * lr;
          }
          for (std::size_t i = 0; i < weights[id].size(); ++i) {
            if (spec.traits.decay && !whole) weights[id][i] *= 1 - lr * 0.05;
            weights[id][i] -= factor * momenta[id][i] / norm;
          }
        }
        optimizer.update({number, lr, scale});
      }
      const double allowed = precision == Precision::kFp64 ? 1e-13 : 1e-5;
      for (ParamId id = 0; id < store.size(); ++id) {
        const std::string what = concat(name, " ", precision_name(precision), " ", store.spec(id).name);
        const at::Tensor expected = at::tensor(weights[id], at::kDouble).view(store.local_shape(id));
        EXPECT_LE(relative_error(store.master(id), expected), allowed) << what;
        EXPECT_TRUE(at::equal(store.weight(id), store.master(id).to(store.weight(id).scalar_type()))) << what;
        EXPECT_EQ(store.grad(id).abs().max().item<double>(), 0) << what;
      }
    }
  }
}

TEST_F(OptimizerDoor, TrainsInEveryLayoutAsOnOneRank) {
  for (const std::string& name : kNames) {
    SCOPED_TRACE(name);
    std::vector<TrainingSetup> setups;
    for (const Layout& layout : {Layout{1, 1, 1}, Layout{1, 1, 2}, Layout{1, 1, 3}, Layout{1, 2, 3}, Layout{1, 2, 1}}) {
      setups.push_back(door_setup(options_for(name), layout));
      setups.push_back(setups.back());
      setups.back().zero = true;
    }
    if (name == "momentum") {  // the other one has no norm of a matrix that is cut
      setups.push_back(door_setup(options_for(name), {2, 1, 1}, /*sequence_parallel=*/true));
    }
    (void)expect_like_one_rank(setups);
  }
}

// One layer has four matrices: of six data ranks some own none, and none owns more than its share and one matrix.
TEST_F(OptimizerDoor, MoreDataRanksThanMatricesShareTheState) {
  std::vector<TrainingSetup> setups;
  for (const int data : {1, 6}) {
    setups.push_back(door_setup(options_for("unit-steps"), {1, 1, data}));
    setups.back().model.layers = 1;
    setups.back().zero = data > 1;
  }
  (void)expect_like_one_rank(setups);
  const TrainingResult shared = train(setups[1]);
  ASSERT_TRUE(shared.fine()) << shared.messages[0];
  double sum = 0, largest = 0, smallest = 1e300;
  for (const auto& [rank, sizes] : shared.sizes) {
    const double bytes = sizes.masters + sizes.states;
    sum += bytes;
    largest = std::max(largest, bytes);
    smallest = std::min(smallest, bytes);
  }
  double largest_matrix = 0, all = 0;
  for (const auto& [name, tensor] : shared.final) {
    const double bytes = 2 * static_cast<double>(tensor.nbytes());  // fp64, with its momentum
    all += bytes;
    if (tensor.dim() == 2 && name.find(".layers.") != std::string::npos)
      largest_matrix = std::max(largest_matrix, bytes);
  }
  EXPECT_LE(largest, sum / 6 + largest_matrix);
  EXPECT_LT(smallest, sum / 6);
  EXPECT_NEAR(sum / all, 1, 0.6);  // once, but for what rounds small parameters up
  EXPECT_LT(largest, 0.5 * sum);
}

void save_to(const std::string& folder, const ParameterStore& store, const Mesh& mesh, std::int64_t step) {
  CheckpointInfo info;
  info.progress.step = step;
  CheckpointFolder(folder).save(store, info, 1, mesh.world(), /*writes=*/true);
}

TEST_F(OptimizerDoor, StatesAreSavedByNameAndLoadedInAnyLayout) {
  for (const std::string& name : kNames) {
    SCOPED_TRACE(name);
    const TemporaryFolder root;
    TrainingSetup saving = door_setup(options_for(name), {1, 2, 3});
    saving.zero = true;
    saving.finish = [&](const ParameterStore& store, const Mesh& mesh) {
      save_to(root / "checkpoints", store, mesh, saving.steps);
    };
    const TrainingResult saved = train(saving);
    ASSERT_TRUE(saved.fine()) << saved.messages[0];
    EXPECT_EQ(saved.states.count("momentum"), 1U);
    EXPECT_EQ(saved.states.count("matrix_momentum"), name == "unit-steps" ? 1U : 0U);
    TrainingResult one;
    for (const Layout& layout : {Layout{1, 1, 1}, Layout{1, 1, 2}, Layout{1, 2, 2}}) {
      TrainingSetup loading = door_setup(options_for(name), layout);
      loading.zero = layout.data > 1;
      loading.checkpoint = root / "checkpoints/step-000000002";
      loading.steps = 0;
      const TrainingResult loaded = train(loading);
      ASSERT_TRUE(loaded.fine()) << layout.text() << ": " << loaded.messages[0];
      const auto same = [&](const auto& found, const auto& expected) {
        ASSERT_EQ(found.size(), expected.size());
        for (const auto& [each, tensor] : expected) EXPECT_TRUE(at::equal(found.at(each), tensor)) << each;
      };
      same(loaded.final, saved.final);
      for (const auto& [state, tensors] : saved.states) same(loaded.states.at(state), tensors);
      // And it goes on alike.
      loading.steps = 1;
      TrainingResult further = train(loading);
      ASSERT_TRUE(further.fine()) << layout.text() << ": " << further.messages[0];
      if (layout.world_size() == 1)
        one = std::move(further);
      else
        EXPECT_LE(worst_norm_error(one.final, further.final).first, 1e-10) << layout.text();
    }
    // Another optimizer's checkpoint lacks what this one keeps: said by name.
    TrainingSetup other = door_setup({"train.optimizer=adamw"});
    other.checkpoint = root / "checkpoints/step-000000002";
    EXPECT_NE(train(other).messages[0].find("exp_avg"), std::string::npos) << train(other).messages[0];
  }
}

}  // namespace
}  // namespace cram::test
