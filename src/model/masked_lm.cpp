#include "model/masked_lm.h"

#include <torch/types.h>

#include "base/profile.h"
#include "model/kernels/panels.h"
#include "model/linear.h"
#include "model/vocabulary.h"

namespace cram {
namespace {

// Legend: R rows of the vocabulary on this rank.
class MaskedLm final : public Objective {
 public:
  explicit MaskedLm(const ObjectiveContext& context)
      : store_(context.store),
        tensor_(context.tensor),
        vocab_size_(context.config.vocab_size),
        range_(vocabulary_range(vocab_size_, tensor_.rank(), tensor_.size())),
        decoder_(context.word_embedding) {}

  std::vector<std::string_view> fields() const override { return {field::kPositions, field::kLabels}; }
  at::Tensor rows(const Batch& batch) const override { return batch[field::kPositions]; }
  std::int64_t count(const Batch& batch) const override { return batch[field::kLabels].numel(); }

  at::Tensor forward(const at::Tensor& hidden, const Batch& batch, Saved& saved) const override {
    const at::Tensor logits = logits_of(hidden);  // [M,R]
    const Timed timed(Section::kLoss);
    at::Tensor loss_sum =
        vocabulary_cross_entropy_(logits, batch[field::kLabels], /*write_gradient=*/true, range_, tensor_.group())
            .loss_sum;
    saved.hidden = hidden;
    saved.more = {logits};  // overwritten by their gradient
    return loss_sum;
  }

  at::Tensor backward(const Batch& /*batch*/, Saved& saved) const override {
    const at::Tensor d_logits = saved.more[0];
    const at::Tensor d_hidden = matmul_backward(d_logits, store_.weight(decoder_), panels_);  // this rank's part
    Work sum = tensor_.group().all_reduce_async_(d_hidden);
    accumulate_weight_grad(store_.grad(decoder_), d_logits, saved.hidden);
    sum.wait();
    saved = {};
    return d_hidden;
  }

  Evaluation evaluate(const at::Tensor& hidden, const Batch& batch) const override {
    const kernels::CrossEntropy result = vocabulary_cross_entropy_(logits_of(hidden), batch[field::kLabels],
                                                                   /*write_gradient=*/false, range_, tensor_.group());
    return {result.loss_sum, result.correct};
  }

  at::Tensor outputs(const at::Tensor& hidden) const override {
    return gather_logits(logits_of(hidden), vocab_size_, tensor_.group());
  }

 private:
  [[nodiscard]] at::Tensor logits_of(const at::Tensor& hidden) const {
    return matmul(hidden, store_.weight(decoder_), panels_);
  }

  const ParameterStore& store_;
  TensorRegion tensor_;
  std::int64_t vocab_size_;
  VocabularyRange range_;
  ParamId decoder_;
  mutable kernels::WeightPanels panels_;
};

}  // namespace

std::unique_ptr<Objective> make_masked_lm(const ObjectiveContext& context) {
  return std::make_unique<MaskedLm>(context);
}

double masked_lm_flops(const ModelConfig& config) {
  return 2 * static_cast<double>(config.hidden) * static_cast<double>(config.vocab_size);
}

}  // namespace cram
