// Rows shorter than the batch they travel in: what stands in their padding reaches no number of their real tokens.
#include <gtest/gtest.h>
#include <torch/types.h>

#include <cmath>

#include "base/check.h"
#include "support/golden.h"

namespace cram::test {
namespace {

constexpr std::int64_t kSeq = 48, kVocab = 61;
const std::vector<std::int64_t> kLengths = {1, 5, 37, kSeq};

ModelConfig model_of_three_layers() { return model_of(3, 32, 4, 64, kVocab, kSeq); }

// Weights that attend to something: with the recipe's small ones all tokens count nearly alike.
void sharpen(ParameterStore& store) {
  for (ParamId id = 0; id < store.size(); ++id) {
    if (store.spec(id).global_shape.size() == 2) store.master(id).mul_(8);
  }
  store.refresh_working();
}

at::Tensor random_ids(std::int64_t rows, std::int64_t seq, std::uint64_t seed) {
  return at::randint(5, kVocab, {rows, seq}, at::detail::createCPUGenerator(seed),
                     at::TensorOptions().dtype(at::kLong));
}

/// What stands behind the tokens of a row.
at::Tensor garbage(const std::string& kind, std::int64_t count) {
  if (kind == "pad") return at::full({count}, static_cast<std::int64_t>(kPadId), at::kLong);
  if (kind == "one word") return at::full({count}, kVocab - 1, at::kLong);
  return random_ids(1, count, 99).view({-1});
}
const std::vector<std::string> kGarbage = {"pad", "one word", "random"};

// Every third token of a row is looked at, from its first on.
at::Tensor positions_of(std::int64_t length) { return at::arange(0, length, 3, at::kLong); }

// A row alone, as long as it is.
Batch alone(std::int64_t length) {
  const at::Tensor ids = random_ids(1, length, static_cast<std::uint64_t>(length));
  const at::Tensor positions = positions_of(length);
  return batch_of(ids, positions, at::index_select(ids.view({-1}), 0, positions).mul(7).remainder(kVocab));
}

// The rows, padded to S, in one micro-batch.
Batch padded(const std::vector<std::int64_t>& lengths, const std::string& kind) {
  std::vector<at::Tensor> ids, positions, labels;
  for (std::size_t row = 0; row < lengths.size(); ++row) {
    const Batch one = alone(lengths[row]);
    ids.push_back(at::cat({one[field::kIds].view({-1}), garbage(kind, kSeq - lengths[row])}));
    positions.push_back(one[field::kPositions] + static_cast<std::int64_t>(row) * kSeq);
    labels.push_back(one[field::kLabels]);
  }
  return batch_of(at::stack(ids), at::cat(positions), at::cat(labels), at::tensor(lengths, at::kLong));
}

Batch without_lengths(const Batch& batch) {
  return batch_of(batch[field::kIds], batch[field::kPositions], batch[field::kLabels]);
}

struct Pass {
  double loss = 0;
  std::vector<at::Tensor> gradients;  // by parameter
  at::Tensor hidden;                  // [B,S,H]
  at::Tensor logits;                  // [M,V]
};

Pass pass_of(Model& model, const Batch& batch) {
  Pass pass;
  model.store.zero_grad();
  pass.loss = forward_backward(model.model, batch).item<double>();
  for (ParamId id = 0; id < model.store.size(); ++id) pass.gradients.push_back(model.store.grad(id).clone());
  pass.hidden = last_hidden(model.model, batch).view({batch.rows, batch.seq_length, -1});
  pass.logits = model.model.objective().outputs(last_hidden(model.model, batch, batch[field::kPositions]));
  return pass;
}

// Largest distance of two lists of gradients, each relative to its own largest element.
double worst_gradient(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& expected) {
  double worst = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) worst = std::max(worst, relative_error(found[i], expected[i]));
  return worst;
}

struct Tolerance {
  Precision precision;
  double hidden, gradient;
};
const std::vector<Tolerance> kTolerances = {{Precision::kFp64, 1e-12, 1e-10}, {Precision::kFp32, 1e-5, 1e-5}};

TEST(Padding, ARowGivesTheNumbersItGivesUnpadded) {
  for (const Tolerance& allowed : kTolerances) {
    for (const char* recompute : {"none", "selective", "layer"}) {
      ModelConfig config = model_of_three_layers();
      config.recompute = recompute;
      Model model(config, allowed.precision);
      sharpen(model.store);
      for (const std::int64_t length : kLengths) {
        const Pass expected = pass_of(model, alone(length));
        for (const std::string& kind : kGarbage) {
          const std::string what =
              concat(precision_name(allowed.precision), " ", recompute, ", ", length, " tokens and ", kind);
          const Pass found = pass_of(model, padded({length}, kind));
          EXPECT_LE(relative_error(found.hidden.narrow(1, 0, length), expected.hidden), allowed.hidden) << what;
          EXPECT_TRUE(found.hidden.isfinite().all().item<bool>()) << what;
          EXPECT_LE(relative_error(found.logits, expected.logits), allowed.hidden) << what;
          EXPECT_LE(std::abs(found.loss / expected.loss - 1), allowed.hidden) << what;
          EXPECT_LE(worst_gradient(found.gradients, expected.gradients), allowed.gradient) << what;
        }
      }
    }
  }
}

TEST(Padding, RowsOfAllLengthsInOneBatchGiveTheSumOfTheSingleOnes) {
  for (const Tolerance& allowed : kTolerances) {
    Model model(model_of_three_layers(), allowed.precision);
    sharpen(model.store);
    double loss = 0;
    std::vector<at::Tensor> gradients;
    std::vector<at::Tensor> logits;
    for (const std::int64_t length : kLengths) {
      const Pass one = pass_of(model, alone(length));
      loss += one.loss;
      logits.push_back(one.logits);
      for (std::size_t i = 0; i < one.gradients.size(); ++i) {
        if (gradients.size() <= i) gradients.push_back(at::zeros_like(one.gradients[i]));
        gradients[i].add_(one.gradients[i]);
      }
    }
    for (const std::string& kind : kGarbage) {
      const std::string what = concat(precision_name(allowed.precision), ", padding ", kind);
      const Pass found = pass_of(model, padded(kLengths, kind));
      EXPECT_LE(std::abs(found.loss / loss - 1), allowed.hidden) << what;
      EXPECT_LE(relative_error(found.logits, at::cat(logits)), allowed.hidden) << what;
      EXPECT_LE(worst_gradient(found.gradients, gradients), allowed.gradient) << what;
    }
  }
}

// The negative control: the same comparison where attention does not know of the padding.
TEST(Padding, WithoutItsLengthARowIsAnotherOne) {
  for (const Tolerance& allowed : kTolerances) {
    Model model(model_of_three_layers(), allowed.precision);
    sharpen(model.store);
    for (const std::int64_t length : {1, 5, 37}) {
      const Pass expected = pass_of(model, alone(length));
      for (const std::string& kind : kGarbage) {
        const std::string what = concat(length, " tokens and ", kind);
        const Pass found = pass_of(model, without_lengths(padded({length}, kind)));
        EXPECT_GE(relative_error(found.hidden.narrow(1, 0, length), expected.hidden), 1000 * allowed.hidden) << what;
        EXPECT_GE(std::abs(found.loss / expected.loss - 1), 10 * allowed.hidden) << what;
        EXPECT_GE(worst_gradient(found.gradients, expected.gradients), 1000 * allowed.gradient) << what;
      }
    }
  }
}

// The last layer computes the rows that the loss looks at; here they are all of them, and few.
TEST(Padding, PickedQueriesAttendToTheSameKeysAsAll) {
  const at::Generator generator = at::detail::createCPUGenerator(1);
  constexpr std::int64_t kHeads = 4, kDim = 8;
  const std::int64_t rows = 4 * kSeq, width = kHeads * kDim;
  const at::Tensor qkv = at::randn({rows, 3 * width}, generator, at::kDouble);
  const at::Tensor lengths = at::tensor(kLengths, at::kLong);
  const at::Tensor picks = padded(kLengths, "random")[field::kPositions];
  const at::Tensor d_picked = at::randn({picks.numel(), width}, generator, at::kDouble);
  for (const bool keep : {true, false}) {
    const kernels::AttentionSettings settings{
        .batch = 4, .heads = kHeads, .head_dim = kDim, .keep_probabilities = keep, .lengths = lengths};
    kernels::AttentionSaved saved, whole;
    const at::Tensor picked = kernels::attention(qkv, settings, &saved, picks);
    const at::Tensor all = kernels::attention(qkv, settings, &whole);
    EXPECT_LE(relative_error(picked, at::index_select(all, 0, picks)), 1e-14);
    const at::Tensor d_qkv = kernels::attention_backward(d_picked, settings, saved);
    EXPECT_LE(
        relative_error(d_qkv, kernels::attention_backward(kernels::put_rows(d_picked, picks, rows), settings, whole)),
        1e-14);
    // Nothing flows into padding: neither into its queries, which nobody asked, nor into its keys and values.
    const at::Tensor by_row = d_qkv.view({4, kSeq, -1});
    for (std::int64_t row = 0; row < 4; ++row) {
      const std::int64_t length = kLengths[static_cast<std::size_t>(row)];
      EXPECT_GT(by_row[row].narrow(0, 0, length).abs().max().item<double>(), 0);
      if (length == kSeq) continue;
      EXPECT_EQ(by_row[row].narrow(0, length, kSeq - length).abs().max().item<double>(), 0);
    }
  }
}

}  // namespace
}  // namespace cram::test
