#include "model/vocabulary.h"

#include <torch/types.h>

#include <algorithm>
#include <limits>

namespace cram {
namespace {

constexpr std::int64_t kRowMultiple = 32;
constexpr std::int64_t kBlockElements = 8 << 20;  // of logits widened at a time

}  // namespace

VocabularyRange vocabulary_range(std::int64_t vocab_size, int tensor_rank, int tensor_size) {
  if (tensor_size == 1) return {0, vocab_size, vocab_size};
  const std::int64_t share = (vocab_size + tensor_size - 1) / tensor_size;
  const std::int64_t rows = (share + kRowMultiple - 1) / kRowMultiple * kRowMultiple;
  const std::int64_t begin = rows * tensor_rank;
  return {begin, rows, std::clamp<std::int64_t>(vocab_size - begin, 0, rows)};
}

kernels::CrossEntropy vocabulary_cross_entropy_(const at::Tensor& logits, const at::Tensor& labels, bool write_gradient,
                                                const VocabularyRange& range, Communicator& tensor) {
  if (tensor.size() == 1) return kernels::cross_entropy_(logits, labels, write_gradient);
  const std::int64_t positions = logits.size(0);
  const at::ScalarType wide = logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::Tensor local = labels - range.begin;                                 // [M]
  const at::Tensor own = local.ge(0).logical_and_(local.lt(range.valid));        // [M] the label is one of our rows
  const at::Tensor safe = local.masked_fill(own.logical_not(), 0).unsqueeze(1);  // [M,1]
  const std::int64_t block = std::max<std::int64_t>(1, kBlockElements / std::max<std::int64_t>(1, range.rows));
  const auto for_blocks = [&](const auto& body) {
    for (std::int64_t begin = 0; begin < positions && range.valid > 0; begin += block) {
      body(begin, std::min(block, positions - begin));
    }
  };
  // What the other ranks need of our columns: log-sum-exp, the label's logit, and for accuracy the best logit and its
  // id.
  const std::int64_t kinds = write_gradient ? 2 : 4;
  const at::Tensor ours = at::zeros({kinds, positions}, logits.options().dtype(wide));
  ours[0].fill_(-std::numeric_limits<double>::infinity());
  if (!write_gradient) ours[2].fill_(-std::numeric_limits<double>::infinity());
  for_blocks([&](std::int64_t begin, std::int64_t count) {
    const at::Tensor f = logits.narrow(0, begin, count).narrow(1, 0, range.valid).to(wide);  // [count,valid]
    ours[0].narrow(0, begin, count).copy_(at::logsumexp(f, {1}));
    ours[1]
        .narrow(0, begin, count)
        .copy_(f.gather(1, safe.narrow(0, begin, count)).squeeze(1) * own.narrow(0, begin, count));
    if (write_gradient) return;
    const auto [best, where] = f.max(1);
    ours[2].narrow(0, begin, count).copy_(best);
    ours[3].narrow(0, begin, count).copy_(where + range.begin);
  });
  const at::Tensor all = at::empty({tensor.size(), kinds, positions}, ours.options());
  tensor.all_gather(all, ours);
  const at::Tensor log_sum = at::logsumexp(all.select(1, 0), {0});  // [M], in rank order on every rank
  kernels::CrossEntropy out;
  out.loss_sum = (log_sum - all.select(1, 1).sum(0)).sum(at::kDouble);
  out.correct = at::zeros({}, labels.options());
  if (!write_gradient) {
    const at::Tensor winner = all.select(1, 2).argmax(0, /*keepdim=*/true);  // [1,M]
    out.correct = all.select(1, 3).gather(0, winner).squeeze(0).eq(labels).sum();
    return out;
  }
  logits.narrow(1, range.valid, range.rows - range.valid).zero_();
  for_blocks([&](std::int64_t begin, std::int64_t count) {
    const at::Tensor rounded = logits.narrow(0, begin, count).narrow(1, 0, range.valid);
    at::Tensor p = at::sub(rounded.to(wide), log_sum.narrow(0, begin, count).unsqueeze(1)).exp_();
    p.scatter_add_(1, safe.narrow(0, begin, count), own.narrow(0, begin, count).to(wide).neg().unsqueeze(1));
    rounded.copy_(p);
  });
  return out;
}

at::Tensor gather_logits(const at::Tensor& logits, std::int64_t vocab_size, Communicator& tensor) {
  if (tensor.size() == 1) return logits;
  const at::Tensor all = at::empty({tensor.size(), logits.size(0), logits.size(1)}, logits.options());
  tensor.all_gather(all, logits.contiguous());
  return all.permute({1, 0, 2}).reshape({logits.size(0), -1}).narrow(1, 0, vocab_size).contiguous();
}

}  // namespace cram
