// Tensor parallel layers and the whole encoder against the dense golden files, as threads, in fp64: the same logits,
// loss and gradients, tensor by tensor, after the shards were put together again.
#include <gtest/gtest.h>
#include <torch/types.h>

#include <mutex>

#include "parallel/communicator_suite.h"
#include "support/expect_error.h"
#include "support/golden.h"
#include "support/thread_ranks.h"
#include "train/forward_pass.h"
#include "train/optimizer.h"

namespace cram::test {
namespace {

constexpr double kTolerance = 1e-10;

// A rank's model with the golden weights' slices.
struct ShardedModel {
  ParameterStore store;
  cram::Model model;

  ShardedModel(const ModelConfig& config, Communicator& tensor, Precision precision = Precision::kFp64)
      : model(config, store, Placement{tensor}, "mlm") {
    store.allocate(precision, at::kCPU, adam_states());
    store.initialize(0);
  }
  void load(const Golden& golden) {
    for (ParamId id = 0; id < store.size(); ++id) {
      store.master(id).copy_(take_slice(golden.at("weight." + store.spec(id).name), store.spec(id)));
    }
    store.refresh_working();
  }
};

// Gradients of all ranks put together: sharded ones part by part, replicated ones once, and equal on all.
class Collected {
 public:
  void add(const ParameterStore& store) {
    const std::lock_guard lock(mutex_);
    for (ParamId id = 0; id < store.size(); ++id) {
      const ParamSpec& spec = store.spec(id);
      at::Tensor& full = full_[spec.name];
      if (!full.defined()) full = at::full(spec.global_shape, std::nan(""), at::kDouble);
      if (!spec.is_sharded() && !full.flatten()[0].isnan().item<bool>()) {
        require(at::equal(full, store.grad(id).to(at::kDouble)),
                "replicated gradient differs between ranks: " + spec.name);
      }
      put_slice(full, spec, store.grad(id).to(at::kDouble));
    }
  }
  [[nodiscard]] const std::map<std::string, at::Tensor>& full() const { return full_; }

 private:
  std::mutex mutex_;
  std::map<std::string, at::Tensor> full_;
};

void expect_all_good(const std::vector<std::string>& messages, const std::string& what) {
  for (std::size_t r = 0; r < messages.size(); ++r) EXPECT_EQ(messages[r], "") << what << ", rank " << r;
}

struct Case {
  const char* golden;
  int ranks;
};
class TensorParallel : public testing::TestWithParam<Case> {};

TEST_P(TensorParallel, EncoderEqualsTheDenseOne) {
  const Golden golden(GetParam().golden);
  Collected gradients;
  const auto messages = run_ranks(GetParam().ranks, [&](Communicator& tensor) {
    ShardedModel model(golden.config, tensor);
    model.load(golden);
    ForwardPass pass(model.model, model.store, self_group());
    require(relative_error(pass.hidden(golden.at("ids")), golden.at("hidden")) < kTolerance, "hidden states");
    require(relative_error(pass.outputs(golden.at("ids"), golden.at("positions")), golden.at("logits")) < kTolerance,
            "logits");
    const Batch batch = batch_of(golden.at("ids"), golden.at("positions"), golden.at("labels"));
    const auto evaluated = pass.evaluate(batch);
    require(relative_error(evaluated.loss_sum, golden.at("loss_sum")) < kTolerance, "evaluated loss");
    const at::Tensor best = golden.at("logits").argmax(1).eq(golden.at("labels")).sum();
    require(at::equal(evaluated.correct, best), "correct predictions");
    const at::Tensor loss = forward_backward(model.model, batch);
    require(relative_error(loss, golden.at("loss_sum")) < kTolerance, "loss");
    gradients.add(model.store);
    // Rows of a padded vocabulary: weight and gradient exactly 0.
    const ParamId embedding = model.store.find("encoder.embedding.word_embedding.weight");
    const VocabularyRange range = vocabulary_range(golden.config.vocab_size, tensor.rank(), tensor.size());
    for (const at::Tensor& table : {model.store.master(embedding), model.store.grad(embedding)}) {
      require(table.slice(0, range.valid).count_nonzero().item<std::int64_t>() == 0, "padded rows");
    }
  });
  expect_all_good(messages, GetParam().golden);
  for (const auto& [name, gradient] : gradients.full()) {
    EXPECT_LE(relative_error(gradient, golden.at("grad." + name)), kTolerance) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, TensorParallel,
                         testing::Values(Case{"two_layers", 1}, Case{"two_layers", 2}, Case{"two_layers", 4},
                                         Case{"one_layer", 2}, Case{"large_weights", 2}));

// Initial values do not depend on the layout: every shard is a slice of the one-rank model's tensor, to the last bit.
TEST(TensorParallelInit, ShardsAreSlicesOfTheWhole) {
  const Golden golden("two_layers");
  Model whole(golden.config, Precision::kFp64);
  whole.store.initialize(5);
  expect_all_good(run_ranks(4,
                            [&](Communicator& tensor) {
                              ShardedModel model(golden.config, tensor);
                              model.store.initialize(5);
                              for (ParamId id = 0; id < model.store.size(); ++id) {
                                const ParamSpec& spec = model.store.spec(id);
                                const at::Tensor expected =
                                    take_slice(whole.store.master(whole.store.find(spec.name)), spec);
                                require(at::equal(model.store.master(id), expected), spec.name);
                              }
                            }),
                  "initial values");
}

// Logits of 1e4, targets in every shard, a rank without real rows, positions without any: against the dense loss.
TEST(VocabularyLoss, EqualsTheDenseOne) {
  struct Size {
    std::int64_t vocab, positions;
  };
  for (const Size& size : {Size{101, 13}, Size{37, 5}, Size{40, 1}, Size{101, 0}}) {
    const at::Tensor full =
        at::randn({size.positions, size.vocab}, at::detail::createCPUGenerator(1), at::kDouble) * 3e3;
    const at::Tensor labels = at::arange(size.positions, at::kLong).mul_(7).remainder_(size.vocab);
    const at::Tensor dense = full.clone();
    const kernels::CrossEntropy expected = kernels::cross_entropy_(dense, labels, true);
    const at::Tensor correct = kernels::cross_entropy_(full.clone(), labels, false).correct;
    for (const int ranks : {2, 3, 4}) {
      expect_all_good(
          run_ranks(
              ranks,
              [&](Communicator& tensor) {
                const VocabularyRange range = vocabulary_range(size.vocab, tensor.rank(), ranks);
                // Padding holds values that must not count.
                const at::Tensor local = at::full({size.positions, range.rows}, 1e5, at::kDouble);
                local.narrow(1, 0, range.valid).copy_(full.narrow(1, std::min(range.begin, size.vocab), range.valid));
                const auto evaluated = vocabulary_cross_entropy_(local.clone(), labels, false, range, tensor);
                require(at::equal(evaluated.correct, correct), "correct");
                const auto loss = vocabulary_cross_entropy_(local, labels, true, range, tensor);
                require(at::allclose(loss.loss_sum, expected.loss_sum, 1e-12, 1e-12), "loss");
                require(at::allclose(local.narrow(1, 0, range.valid),
                                     dense.narrow(1, std::min(range.begin, size.vocab), range.valid), 1e-12, 1e-12),
                        "gradient");
                require(local.slice(1, range.valid).count_nonzero().item<std::int64_t>() == 0, "padding");
              }),
          std::to_string(size.vocab) + " entries");
    }
  }
}

TEST(VocabularyRange, CoversTheVocabularyOnce) {
  for (const std::int64_t vocab : {1LL, 31LL, 32LL, 33LL, 101LL, 4096LL, 32768LL, 50257LL}) {
    for (int ranks = 1; ranks <= 8; ++ranks) {
      std::int64_t covered = 0;
      for (int r = 0; r < ranks; ++r) {
        const VocabularyRange range = vocabulary_range(vocab, r, ranks);
        EXPECT_EQ(range.rows, vocabulary_range(vocab, 0, ranks).rows);
        EXPECT_EQ(std::min(range.begin, vocab), covered);
        covered += range.valid;
      }
      EXPECT_EQ(covered, vocab);
    }
  }
}

// All gradients 1: the norm is the square root of the number of parameters; replicated tensors and padding must not
// count twice.
TEST(GradientNorm, CountsEveryParameterOnce) {
  const Golden golden("two_layers");
  const double expected = std::sqrt(static_cast<double>(parameter_count(golden.config)));
  for (const int ranks : {1, 2, 4}) {
    expect_all_good(
        run_ranks(ranks,
                  [&](Communicator& tensor) {
                    ShardedModel model(golden.config, tensor);
                    for (ParamId id = 0; id < model.store.size(); ++id) {
                      const ParamSpec& spec = model.store.spec(id);
                      model.store.grad(id).copy_(take_slice(at::ones(spec.global_shape, at::kDouble), spec));
                    }
                    const Mesh mesh(tensor, Layout{.tensor = ranks});
                    const at::Tensor sum =
                        at::full({1}, Optimizer("adamw", model.store, {}, mesh).own_sum_of_squares(), at::kDouble);
                    tensor.all_reduce_(sum);
                    const double norm = std::sqrt(sum.item<double>());
                    require(std::abs(norm - expected) < 1e-9 * expected, "norm " + std::to_string(norm));
                  }),
        std::to_string(ranks) + " ranks");
  }
}

TEST(TensorParallelSizes, IllegalOnesNameTheLegalOnes) {
  ModelConfig config;
  config.vocab_size = 100;
  config.seq_length = 16;
  config.hidden = 48;
  config.heads = 12;
  config.ffn = 96;
  config.layers = 1;
  for (const std::string& message : run_ranks(5, [&](Communicator& tensor) {
         ParameterStore store;
         const Encoder encoder(config, store, Placement{tensor});
       })) {
    EXPECT_NE(message.find("parallel.tensor=5"), std::string::npos) << message;
    EXPECT_NE(message.find("legal sizes: 1, 2, 3, 4, 6, 12"), std::string::npos) << message;
  }
}

}  // namespace
}  // namespace cram::test
