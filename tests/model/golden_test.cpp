// The encoder against the reference twin: forward, loss, every gradient. Tolerances are relative to the largest element
// of the expected tensor, unless norms are named.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "support/golden.h"

namespace cram {
namespace {

using test::Golden;
using test::Model;
using test::norm_error;
using test::relative_error;

const char* const kFiles[] = {"one_layer", "two_layers", "large_weights"};

double run(Model& model, const Golden& golden) {
  return model.forward_backward(golden.at("ids"), golden.at("positions"), golden.at("labels")).item<double>();
}

// Largest relative error over hidden states, logits, loss and all gradients; `worst` names the tensor.
double distance(Model& model, const Golden& golden, std::string* worst = nullptr) {
  double largest = 0;
  const auto look = [&](const std::string& name, double error) {
    if (error <= largest) return;
    largest = error;
    if (worst != nullptr) *worst = name;
  };
  look("hidden", relative_error(model.hidden(golden.at("ids")), golden.at("hidden")));
  look("logits", relative_error(model.logits(golden.at("ids"), golden.at("positions")), golden.at("logits")));
  model.store.zero_grad();
  look("loss_sum", std::abs(run(model, golden) / golden.number("loss_sum") - 1));
  for (ParamId id = 0; id < model.store.size(); ++id) {
    const std::string& name = model.store.spec(id).name;
    look("grad." + name, relative_error(model.store.grad(id), golden.at("grad." + name)));
  }
  return largest;
}

class GoldenFile : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, GoldenFile, testing::ValuesIn(kFiles),
                         [](const auto& given) { return std::string(given.param); });

TEST_P(GoldenFile, Fp64AgreesToTenDigits) {
  const Golden golden(GetParam());
  Model model(golden.config, Precision::kFp64);
  model.load(golden);
  std::string worst;
  EXPECT_LE(distance(model, golden, &worst), 1e-10) << worst;
  EXPECT_NEAR(run(model, golden) / golden.number("loss_sum"), 1, 1e-12);
  EXPECT_NEAR(golden.number("loss_mean") * static_cast<double>(golden.at("labels").numel()), golden.number("loss_sum"),
              1e-9);
}

TEST_P(GoldenFile, Fp32AgreesToFiveDigits) {
  const Golden golden(GetParam());
  Model model(golden.config, Precision::kFp32);
  model.load(golden);
  std::string worst;
  // With weights ten times larger, logits of 50 and saturated attention amplify every rounding (measured 7e-6, against
  // 2e-6 for the others); another order of summation may double that.
  const double limit = std::string(GetParam()) == "large_weights" ? 3e-5 : 1e-5;
  EXPECT_LE(distance(model, golden, &worst), limit) << worst;
}

TEST_P(GoldenFile, EveryGoldenParameterIsOneOfTheModel) {
  const Golden golden(GetParam());
  Model model(golden.config, Precision::kFp64);
  std::size_t golden_parameters = 0;
  for (const auto& [name, tensor] : golden.tensors) {
    if (name.rfind("weight.", 0) != 0) continue;
    ++golden_parameters;
    ASSERT_TRUE(model.store.has(name.substr(7))) << name;
    EXPECT_EQ(model.store.spec(model.store.find(name.substr(7))).global_shape, tensor.sizes().vec()) << name;
  }
  EXPECT_EQ(golden_parameters, model.store.size());
}

TEST_P(GoldenFile, EveryParameterHasAGradient) {
  const Golden golden(GetParam());
  Model model(golden.config, Precision::kFp64);
  model.load(golden);
  run(model, golden);
  for (ParamId id = 0; id < model.store.size(); ++id) {
    EXPECT_GT(model.store.grad(id).abs().max().item<double>(), 0) << model.store.spec(id).name;
  }
}

TEST_P(GoldenFile, TheSameInputGivesTheSameBits) {
  const Golden golden(GetParam());
  for (const Precision precision : {Precision::kFp64, Precision::kFp32, Precision::kBf16}) {
    Model a(golden.config, precision), b(golden.config, precision);
    a.load(golden);
    b.load(golden);
    EXPECT_EQ(run(a, golden), run(b, golden));
    for (ParamId id = 0; id < a.store.size(); ++id) {
      EXPECT_TRUE(a.store.grad(id).equal(b.store.grad(id))) << a.store.spec(id).name;
    }
  }
}

TEST_P(GoldenFile, EvaluationAgreesWithTraining) {
  const Golden golden(GetParam());
  Model model(golden.config, Precision::kFp64);
  model.load(golden);
  const Objective::Evaluation result = model.evaluate(golden.at("ids"), golden.at("positions"), golden.at("labels"));
  EXPECT_NEAR(result.loss_sum.item<double>() / golden.number("loss_sum"), 1, 1e-12);
  EXPECT_EQ(result.correct.item<std::int64_t>(),
            golden.at("logits").argmax(1).eq(golden.at("labels")).sum().item<std::int64_t>());
  for (ParamId id = 0; id < model.store.size(); ++id) {
    EXPECT_EQ(model.store.grad(id).abs().max().item<double>(), 0) << "evaluation left a gradient";
  }
}

// bf16: ||difference|| / ||gradient|| <= 4 * 1.03^(L+1-l) * 2^-7 for layer l of L (embedding 0, final norm L+1).
TEST(Bf16, GradientsStayWithinTheStatedTolerance) {
  for (const char* name : {"one_layer", "two_layers"}) {
    const Golden golden(name);
    Model model(golden.config, Precision::kBf16);
    model.load(golden);
    EXPECT_NEAR(run(model, golden) / golden.number("loss_sum"), 1, 1e-2);
    for (ParamId id = 0; id < model.store.size(); ++id) {
      const std::string& parameter = model.store.spec(id).name;
      double layer = parameter.rfind("encoder.embedding", 0) == 0 ? 0 : static_cast<double>(golden.config.layers) + 1;
      if (parameter.rfind("encoder.layers.", 0) == 0) layer = std::stod(parameter.substr(15)) + 1;
      double limit = 4 * std::pow(1.03, static_cast<double>(golden.config.layers) + 1 - layer) / 128;
      // One number, a sum over all tokens that nearly cancels: its rounding is relative to the terms, not to the sum.
      if (parameter.find("scale_factor") != std::string::npos) limit *= 4;
      EXPECT_LE(norm_error(model.store.grad(id), golden.at("grad." + parameter)), limit) << name << " " << parameter;
      EXPECT_EQ(model.store.grad(id).scalar_type(), at::kFloat);
    }
  }
}

TEST(Accumulation, TwoMicroBatchesAddUp) {
  const Golden golden("two_layers");
  const std::int64_t seq = golden.config.seq_length;
  for (const Precision precision : {Precision::kFp64, Precision::kFp32}) {
    Model whole(golden.config, precision), parts(golden.config, precision);
    whole.load(golden);
    parts.load(golden);
    const double loss = run(whole, golden);
    double sum = 0;
    for (const auto& [first, last] : {std::pair<std::int64_t, std::int64_t>{0, 2}, {2, 5}}) {
      const at::Tensor picked =
          golden.at("positions").ge(first * seq).logical_and(golden.at("positions").lt(last * seq));
      sum += parts
                 .forward_backward(golden.at("ids").slice(0, first, last),
                                   golden.at("positions").masked_select(picked) - first * seq,
                                   golden.at("labels").masked_select(picked))
                 .item<double>();
    }
    const double limit = precision == Precision::kFp64 ? 1e-12 : 1e-5;
    EXPECT_NEAR(sum / loss, 1, limit);
    for (ParamId id = 0; id < whole.store.size(); ++id) {
      EXPECT_LE(relative_error(parts.store.grad(id), whole.store.grad(id)), limit) << whole.store.spec(id).name;
    }
  }
}

TEST(Accumulation, TheSameBatchTwiceDoublesTheGradient) {
  const Golden golden("one_layer");
  for (const Precision precision : {Precision::kFp64, Precision::kFp32, Precision::kBf16}) {
    Model once(golden.config, precision), twice(golden.config, precision);
    once.load(golden);
    twice.load(golden);
    run(once, golden);
    run(twice, golden);
    run(twice, golden);
    for (ParamId id = 0; id < once.store.size(); ++id) {
      EXPECT_LE(relative_error(twice.store.grad(id), 2 * once.store.grad(id)),
                precision == Precision::kFp64 ? 1e-13 : 1e-6)
          << once.store.spec(id).name;
    }
  }
}

TEST(MaskedPositions, NoneIsALossOfZeroWithoutGradients) {
  const Golden golden("one_layer");
  for (const Precision precision : {Precision::kFp64, Precision::kBf16}) {
    Model model(golden.config, precision);
    const at::Tensor none = at::empty({0}, at::kLong);
    EXPECT_EQ(model.forward_backward(golden.at("ids"), none, none).item<double>(), 0);
    for (ParamId id = 0; id < model.store.size(); ++id) {
      EXPECT_EQ(model.store.grad(id).abs().max().item<double>(), 0) << model.store.spec(id).name;
    }
    EXPECT_EQ(model.evaluate(golden.at("ids"), none, none).loss_sum.item<double>(), 0);
  }
}

TEST(MaskedPositions, TheirOrderDoesNotMatter) {
  const Golden golden("two_layers");
  Model a(golden.config, Precision::kFp64), b(golden.config, Precision::kFp64);
  a.load(golden);
  b.load(golden);
  const double loss = run(a, golden);
  EXPECT_NEAR(
      b.forward_backward(golden.at("ids"), golden.at("positions").flip(0), golden.at("labels").flip(0)).item<double>() /
          loss,
      1, 1e-13);
  for (ParamId id = 0; id < a.store.size(); ++id) {
    EXPECT_LE(relative_error(b.store.grad(id), a.store.grad(id)), 1e-12) << a.store.spec(id).name;
  }
}

TEST(PadRow, TheLookUpSendsNoGradientTheDecoderDoes) {
  const Golden golden("two_layers");
  ASSERT_GT(golden.at("ids").eq(kPadId).sum().item<std::int64_t>(), 0);
  Model model(golden.config, Precision::kFp64);
  model.load(golden);
  run(model, golden);
  // The decoder's part alone: (softmax - onehot)^T times the final norm at the masked positions.
  const at::Tensor ids = golden.at("ids"), positions = golden.at("positions"), labels = golden.at("labels");
  at::Tensor p = at::softmax(golden.at("logits"), -1);
  p.scatter_add_(1, labels.unsqueeze(1), at::full({labels.size(0), 1}, -1, at::kDouble));
  const at::Tensor masked = golden.at("hidden").view({-1, golden.config.hidden}).index_select(0, positions);
  const at::Tensor decoder_part = at::mm(p.t(), masked);  // [V,H]
  const at::Tensor grad = model.store.grad(model.store.find("encoder.embedding.word_embedding.weight"));
  EXPECT_LE(relative_error(grad[kPadId], decoder_part[kPadId]), 1e-12);
  // The control: a row that is looked up has more than the decoder's part.
  const std::int64_t used = ids.masked_select(ids.ne(kPadId))[0].item<std::int64_t>();
  EXPECT_GT(relative_error(grad[used], decoder_part[used]), 1e-3);
}

TEST(ShortRows, PositionsStartAtZero) {
  // A row shorter than the model's length equals the start of the position table.
  const Golden golden("one_layer");
  Model model(golden.config, Precision::kFp64);
  model.load(golden);
  const at::Tensor ids = golden.at("ids").slice(1, 0, 5).contiguous();
  const at::Tensor hidden = model.hidden(ids);
  EXPECT_EQ(hidden.sizes(), (std::vector<std::int64_t>{1, 5, golden.config.hidden}));
  ModelConfig short_config = golden.config;
  short_config.seq_length = 5;
  Model other(short_config, Precision::kFp64);
  other.load(golden);
  EXPECT_LE(relative_error(other.hidden(ids), hidden), 1e-13);
}

TEST(LargeScores, SaturatedAttentionStaysFinite) {
  // Attention scores of 1e4 and more: a softmax that did not take off the maximum would overflow.
  const Golden golden("one_layer");
  for (const Precision precision : {Precision::kFp64, Precision::kFp32, Precision::kBf16}) {
    Model model(golden.config, precision);
    model.load(golden);
    model.store.master(model.store.find("encoder.layers.0.attn.self_attention.query_key_value.weight")).mul_(1e4);
    model.store.refresh_working();
    EXPECT_TRUE(std::isfinite(run(model, golden)));
    for (ParamId id = 0; id < model.store.size(); ++id) {
      EXPECT_TRUE(at::isfinite(model.store.grad(id)).all().item<bool>()) << model.store.spec(id).name;
    }
  }
}

TEST(SinusoidalTable, IsTheFormula) {
  const at::Tensor table = sinusoidal_table(9, 6);
  for (int s = 0; s < 9; ++s) {
    for (int i = 0; i < 3; ++i) {
      const double angle = s / std::pow(10000.0, 2.0 * i / 6);
      EXPECT_NEAR(table[s][2 * i].item<double>(), std::sin(angle), 1e-14);
      EXPECT_NEAR(table[s][2 * i + 1].item<double>(), std::cos(angle), 1e-14);
    }
  }
}

// Each of these mistakes must be seen by the comparison above; otherwise it proves nothing.
TEST(NegativeControls, TheComparisonSeesEachOfTheseMistakes) {
  const Golden golden("two_layers");
  const std::int64_t heads = golden.config.heads, d = golden.config.head_dim(), hidden = golden.config.hidden;
  const auto master = [](Model& model, const std::string& name) { return model.store.master(model.store.find(name)); };
  const std::string layer = "encoder.layers.1.";
  const std::string qkv = layer + "attn.self_attention.query_key_value.weight";
  struct Mistake {
    const char* what;
    std::function<void(Model&, Golden&)> make;
  };
  const Mistake mistakes[] = {
      {"GLU halves swapped",
       [&](Model& m, Golden&) {
         const at::Tensor w = master(m, layer + "ffn.dense_in.weight");
         w.copy_(at::cat({w.slice(0, golden.config.ffn / 2), w.slice(0, 0, golden.config.ffn / 2)}));
       }},
      {"fused rows as [3,heads,d] instead of [heads,3,d]",
       [&](Model& m, Golden&) {
         const at::Tensor w = master(m, qkv);
         w.copy_(w.view({heads, 3, d, hidden}).transpose(0, 1).reshape({3 * hidden, hidden}));
       }},
      {"queries and keys swapped",
       [&](Model& m, Golden&) {
         const at::Tensor w = master(m, qkv);
         const at::Tensor v = w.view({heads, 3, d, hidden});
         w.copy_(at::stack({v.select(1, 1), v.select(1, 0), v.select(1, 2)}, 1).reshape({3 * hidden, hidden}));
       }},
      {"dense transposed",
       [&](Model& m, Golden&) {
         const at::Tensor w = master(m, layer + "attn.dense.weight");
         w.copy_(w.t().clone());
       }},
      {"sign of one weight", [&](Model& m, Golden&) { master(m, layer + "ffn.dense_out.weight")[0][0].neg_(); }},
      {"norms exchanged",
       [&](Model& m, Golden&) {
         const at::Tensor a = master(m, layer + "norm1.weight"), b = master(m, layer + "norm2.weight");
         const at::Tensor kept = a.clone();
         a.copy_(b);
         b.copy_(kept);
       }},
      {"no position scale",
       [&](Model& m, Golden&) { master(m, "encoder.embedding.pos_embedding.scale_factor").zero_(); }},
      {"layers exchanged",
       [&](Model& m, Golden&) {
         const at::Tensor a = master(m, "encoder.layers.0.attn.dense.weight"),
                          b = master(m, layer + "attn.dense.weight");
         const at::Tensor kept = a.clone();
         a.copy_(b);
         b.copy_(kept);
       }},
      {"one label", [&](Model&, Golden& g) { g.tensors["labels"][0].fill_(7); }},
      {"one position", [&](Model&, Golden& g) { g.tensors["positions"][0].add_(1); }},
      {"one id", [&](Model&, Golden& g) { g.tensors["ids"][0][0].fill_(9); }},
  };
  for (const Mistake& mistake : mistakes) {
    Golden changed("two_layers");
    Model model(golden.config, Precision::kFp64);
    model.load(changed);
    ASSERT_LE(distance(model, changed), 1e-10);
    mistake.make(model, changed);
    model.store.refresh_working();
    EXPECT_GT(distance(model, changed), 1e-4) << mistake.what;
  }
}

}  // namespace
}  // namespace cram
