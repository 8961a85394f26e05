#include "train/step_graph.h"

#include <torch/types.h>

#include <algorithm>
#include <exception>

#include "base/check.h"
#include "base/log.h"

namespace cram {

StepGraphs::Shape* StepGraphs::shape_of(const Batch& batch) {
  for (Shape& shape : shapes_) {
    const auto same = [](const Batch::Field& a, const Batch::Field& b) {
      return a.name == b.name && a.tensor.sizes() == b.tensor.sizes();
    };
    const std::vector<Batch::Field>&known = shape.fixed.fields(), &given = batch.fields();
    if (std::equal(known.begin(), known.end(), given.begin(), given.end(), same)) return &shape;
  }
  if (shapes_.size() == kMostShapes) {
    if (!said_too_many_) {
      log_warning("micro-batches have more than ", kMostShapes,
                  " shapes: further ones run without a graph; a constant train.mask_rate makes one shape");
    }
    said_too_many_ = true;
    return nullptr;
  }
  Shape& shape = shapes_.emplace_back();
  shape.fixed = batch.map([](const at::Tensor& x) { return at::empty_like(x); });
  return &shape;
}

void StepGraphs::run(const Batch& batch, const std::function<void(const Batch&)>& work) {
  Shape* shape = gave_up_ ? nullptr : shape_of(batch);
  if (shape == nullptr) {
    work(batch);
    return;
  }
  for (const Batch::Field& field : batch.fields()) {
    shape->fixed[field.name].copy_(field.tensor, /*non_blocking=*/true);
  }
  const std::function<void()> on_fixed = [work, fixed = shape->fixed] { work(fixed); };
  if (shape->warm_ups < kWarmUps) {
    ++shape->warm_ups;
    recorder_->warm_up(on_fixed);
    return;
  }
  if (shape->recorded == nullptr) {
    try {
      shape->recorded = recorder_->record(on_fixed);
    } catch (const std::exception& error) {
      if (required_) throw;
      log_warning("a micro-step cannot be recorded as a CUDA graph, running without: ", error.what());
      gave_up_ = true;
      shapes_.clear();
      work(batch);
      return;
    }
  }
  shape->recorded->replay();
}

GraphChoice choose_cuda_graph(const Config& config, const Layout& layout, at::Device device) {
  const std::string& mode = config.run.cuda_graph;
  if (mode == "off") return {.reason = "run.cuda_graph=off"};
  std::string obstacle;
  if (!device.is_cuda()) {
    obstacle = concat("the device is ", device.str());
  } else if (layout.pipeline > 1) {
    obstacle = concat("parallel.pipeline=", layout.pipeline, " exchanges activations inside of a micro-step");
  } else if (layout.tensor > 1) {
    obstacle = concat("parallel.tensor=", layout.tensor, " sums activations over ranks inside of a micro-step");
  } else if (config.model.dropout > 0) {
    obstacle = concat("model.dropout=", config.model.dropout, " draws its masks on the host");
  }
  CRAM_CHECK(mode != "on" || obstacle.empty(), ExitCode::kUsage, "run.cuda_graph=on is not possible: ", obstacle,
             "; use run.cuda_graph=auto");
  if (!obstacle.empty()) return {.reason = obstacle};
  return {true, mode == "on",
          layout.data > 1 ? "all but the last of a batch, which exchanges gradients" : "all of them"};
}

std::unique_ptr<StepGraphs> make_step_graphs(const GraphChoice& choice, at::Device device) {
  if (device.is_cuda()) {
    log_info(choice.use ? "micro-steps as a CUDA graph: " : "micro-steps without a CUDA graph: ", choice.reason);
  }
  if (!choice.use) return nullptr;
  return std::make_unique<StepGraphs>(make_cuda_graph_recorder(device), choice.required);
}

}  // namespace cram
