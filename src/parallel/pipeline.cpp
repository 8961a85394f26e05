#include "parallel/pipeline.h"

#include <torch/types.h>

#include <deque>
#include <map>
#include <tuple>
#include <utility>

#include "base/check.h"

namespace cram {
namespace {

using Key = std::tuple<bool, int, int>;  // is_gradient, micro-batch, the later block of the two

// A message is told from every other one between the same ranks, whatever the order they are sent in.
int tag_of(const Transfer& transfer, const PlanShape& shape) {
  return (transfer.micro_batch * shape.blocks() + transfer.block) * 2 + (transfer.is_gradient ? 1 : 0);
}

class Mail {
 public:
  Mail(const PlanShape& shape, Communicator& pipeline) : shape_(shape), pipeline_(pipeline) {}

  void put(const Key& key, at::Tensor tensor) { tensors_[key] = std::move(tensor); }
  at::Tensor take(const Key& key) {
    const auto found = tensors_.find(key);
    CRAM_CHECK(found != tensors_.end(), ExitCode::kOther, "the pipeline plan uses an activation that is not there");
    at::Tensor tensor = std::move(found->second);
    tensors_.erase(found);
    return tensor;
  }

  void exchange(const std::vector<Transfer>& transfers, PipelineStage& stage) {
    std::vector<Message> sends, receives;
    for (const Transfer& t : transfers) {
      const Key key{t.is_gradient, t.micro_batch, t.block};
      if (t.is_send) {
        sends.push_back({t.peer, take(key), tag_of(t, shape_)});
      } else {
        receives.push_back({t.peer, stage.make_activation(t.micro_batch), tag_of(t, shape_)});
        put(key, receives.back().tensor);
      }
    }
    if (!pipeline_.sends_in_background()) {
      pipeline_.exchange_(sends, receives);
      return;
    }
    if (!sends.empty()) on_the_way_.push_back({pipeline_.exchange_async_(sends, {}), sends});
    while (!on_the_way_.empty() && on_the_way_.front().work.done()) finish_oldest();
    if (!receives.empty()) pipeline_.exchange_({}, receives);
  }

  void finish() {
    while (!on_the_way_.empty()) finish_oldest();
  }

 private:
  struct OnTheWay {
    Work work;
    std::vector<Message> messages;  // keeps the tensors
  };
  void finish_oldest() {
    on_the_way_.front().work.wait();
    on_the_way_.pop_front();
  }
  const PlanShape& shape_;
  Communicator& pipeline_;
  std::map<Key, at::Tensor> tensors_;
  std::deque<OnTheWay> on_the_way_;
};

}  // namespace

void run_pipeline(const StagePlan& plan, const PlanShape& shape, PipelineStage& stage, Communicator& pipeline) {
  CRAM_DCHECK(pipeline.size() == shape.stages);
  Mail mail(shape, pipeline);
  const int last = shape.blocks() - 1;
  for (const PlanStep& step : plan) {
    const int m = step.micro_batch, block = step.block;
    if (step.kind != PlanStep::Kind::kExchange) pipeline.pending().set_micro_batch(m);
    switch (step.kind) {
      case PlanStep::Kind::kExchange: mail.exchange(step.transfers, stage); break;
      case PlanStep::Kind::kForward: {
        at::Tensor output = stage.forward(block, m, block == 0 ? at::Tensor() : mail.take({false, m, block}));
        if (block < last) mail.put({false, m, block + 1}, std::move(output));
        break;
      }
      case PlanStep::Kind::kBackward: {
        at::Tensor d_input = stage.backward(block, m, block == last ? at::Tensor() : mail.take({true, m, block + 1}));
        if (block > 0) mail.put({true, m, block}, std::move(d_input));
        break;
      }
    }
  }
  mail.finish();
  pipeline.pending().set_micro_batch(-1);
}

}  // namespace cram
