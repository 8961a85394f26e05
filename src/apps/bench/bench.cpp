#include "apps/bench/bench.h"

#include <algorithm>

#include "base/clock.h"
#include "train/device.h"

namespace cram {

const std::vector<Bench>& benches() {
  static const std::vector<Bench> table = {
      {"step", "tokens/s of a training step, its parts, and its matrix products alone", bench_step, 0, true, true},
      {"gemm", "the step's matrix products, shape by shape: ATen's and our own", bench_gemm},
      {"kernels", "fused kernels against their compositions: time, bytes, bandwidth", bench_kernels},
      {"optimizer", "the optimizer step of the whole model against streaming its bytes once", bench_optimizer},
      {"loader", "rows/s of the data path (data.shards=FOLDER)", bench_loader},
      {"parallel", "a step's computing, hidden and exposed communication, and the efficiency of more data ranks",
       bench_parallel, 0, true},
      {"pipeline", "bubbles of 1F1B and interleaved schedules against their formulas (mpirun -n STAGES)",
       bench_pipeline, 0, true},
      {"compare", "RUN RUN: differences of losses, gradient norms and weights; bytes sent against the formulas",
       bench_compare, 2},
  };
  return table;
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double median_time_s(const std::function<void()>& call, int calls, at::Device device) {
  const int together = device.is_cuda() ? 10 : 1;
  const auto settle = [&] {
    if (device.is_cuda()) wait_for_device();
  };
  call();
  call();
  std::vector<double> seconds;
  for (int i = 0; i < calls; ++i) {
    settle();
    const double from_s = steady_now_s();
    for (int k = 0; k < together; ++k) call();
    settle();
    seconds.push_back((steady_now_s() - from_s) / together);
  }
  return median(seconds);
}

}  // namespace cram
