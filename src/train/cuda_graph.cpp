// Recording on a GPU: a stream capture of everything that the work launches.
#include "base/check.h"
#include "train/step_graph.h"

#ifdef CRAM_CUDA
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#endif

namespace cram {

#ifdef CRAM_CUDA
namespace {

class CudaGraph final : public RecordedStep {
 public:
  void replay() override { graph.replay(); }
  at::cuda::CUDAGraph graph;
};

class CudaGraphRecorder final : public GraphRecorder {
 public:
  explicit CudaGraphRecorder(at::Device device)
      : device_(device),
        stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device.index())),
        pool_(at::cuda::graph_pool_handle()) {}

  void warm_up(const std::function<void()>& work) override {
    const c10::cuda::CUDAStream outer = c10::cuda::getCurrentCUDAStream(device_.index());
    follow(stream_, outer);
    {
      const c10::cuda::CUDAStreamGuard guard(stream_);
      work();
    }
    follow(outer, stream_);
  }

  std::unique_ptr<RecordedStep> record(const std::function<void()>& work) override {
    // The activations of the warm-ups would lie beside those of the graph, which has memory of its own.
    c10::cuda::device_synchronize();
    c10::cuda::CUDACachingAllocator::emptyCache();
    auto made = std::make_unique<CudaGraph>();
    const c10::cuda::CUDAStreamGuard guard(stream_);
    // Of this thread alone: the loader's thread takes page-locked memory meanwhile. One pool for all shapes: graphs are
    // replayed one after the other, and nothing of one is read after the next began.
    made->graph.capture_begin(pool_, cudaStreamCaptureModeThreadLocal);
    try {
      work();
    } catch (...) {
      end_broken(made->graph);
      throw;
    }
    made->graph.capture_end();
    return made;
  }

 private:
  // `later` goes on when what `earlier` has now is done.
  static void follow(const c10::cuda::CUDAStream& later, const c10::cuda::CUDAStream& earlier) {
    at::cuda::CUDAEvent event;
    event.record(earlier);
    event.block(later);
  }
  static void end_broken(at::cuda::CUDAGraph& graph) noexcept {
    try {
      graph.capture_end();
    } catch (...) {  // the first error says more
    }
  }

  at::Device device_;
  c10::cuda::CUDAStream stream_;
  at::cuda::MempoolId_t pool_;
};

}  // namespace

std::unique_ptr<GraphRecorder> make_cuda_graph_recorder(at::Device device) {
  return std::make_unique<CudaGraphRecorder>(device);
}
#else
std::unique_ptr<GraphRecorder> make_cuda_graph_recorder(at::Device device) {
  fail(ExitCode::kUsage, "no CUDA graphs on ", device.str(), ": this program was built without CUDA (CRAM_CUDA=OFF)");
}
#endif

}  // namespace cram
