#include "train/device.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <ATen/cpu/Utils.h>
#include <torch/types.h>
#include <torch/version.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#ifdef CRAM_CUDA
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>
#endif

#include "base/check.h"
#include "base/version.h"
#include "train/cpu_memory.h"

namespace cram {
namespace {

bool cpu_has(const std::string& capability) {
  static const auto capabilities = at::cpu::get_cpu_capabilities();
  const auto found = capabilities.find(capability);
  return found != capabilities.end() && found->second.isBool() && found->second.toBool();
}

// Matrix units that make bf16 the faster format on a CPU; "" when there is none.
std::string cpu_bf16_unit() {
  if (cpu_has("amx_tile") && cpu_has("amx_bf16")) return "AMX";
  if (cpu_has("avx512_bf16")) return "AVX512-BF16";
  return "";
}

// "AMD EPYC 9B45 (AVX512-BF16)"
std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  std::string name = "cpu";
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    name = line.substr(std::min(line.size(), line.find(':') + 2));
    break;
  }
  const std::string unit = cpu_bf16_unit();
  return unit.empty() ? name : concat(name, " (", unit, ")");
}

// Of /proc/meminfo; 0 where it cannot be read.
double available_memory_bytes() {
  std::ifstream info("/proc/meminfo");
  std::string key;
  double kib = 0;
  for (std::string line; std::getline(info, line);) {
    if (std::istringstream(line) >> key >> kib && key == "MemAvailable:") return kib * 1024;
  }
  return 0;
}

// "" when the GPU's tensor cores do not know bf16 (before sm_80).
std::string gpu_bf16_unit(int index) {
#ifdef CRAM_CUDA
  if (at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(index))->major >= 8) return "bf16 tensor cores";
#endif
  (void)index;
  return "";
}

std::string gpu_name(int index) {
#ifdef CRAM_CUDA
  return concat("cuda:", index, " ", at::cuda::getDeviceProperties(static_cast<c10::DeviceIndex>(index))->name);
#else
  return concat("cuda:", index);
#endif
}

int gpu_of(int local_rank) {
#ifdef CRAM_CUDA
  return local_rank % static_cast<int>(c10::cuda::device_count());
#else
  (void)local_rank;
  return 0;
#endif
}

std::string host_name() {
  char host[256] = "?";
  (void)::gethostname(host, sizeof host - 1);
  return host;
}

}  // namespace

std::string DeviceChoice::text() const {
  return concat("device ", device_name, " (", threads, threads == 1 ? " thread" : " threads", "), precision ",
                precision_name(precision), ": ", precision_reason);
}

MachinePlace machine_place(const Launch& launch) {
  const bool alone_under_launcher = launch.launcher != "none" && launch.local_size == 1;
  return {std::max(1, available_processors(alone_under_launcher) / launch.local_size), launch.local_rank,
          launch.local_size};
}

DeviceChoice propose_device(const Config& config, const MachinePlace& place, bool plans) {
  DeviceChoice choice;
  choice.local_ranks = place.local_ranks;
  const bool gpu = at::hasCUDA();  // false without a visible device, too
  CRAM_CHECK(config.run.device != "cuda" || gpu || plans, ExitCode::kUsage,
             "run.device=cuda, but no GPU is visible to this process; check the driver and CUDA_VISIBLE_DEVICES, or "
             "use run.device=cpu");
  const bool on_gpu = config.run.device == "cuda" || (config.run.device == "auto" && gpu);
  const bool absent = on_gpu && !gpu;
  const int gpu_index = absent ? 0 : on_gpu ? gpu_of(place.local_rank) : -1;
  choice.device = at::Device(on_gpu ? at::kCUDA : at::kCPU, static_cast<c10::DeviceIndex>(gpu_index));
  choice.host = host_name();
  choice.device_name = absent ? "cuda, not visible here" : on_gpu ? gpu_name(gpu_index) : "cpu";
  choice.model_name = on_gpu ? choice.device_name.substr(choice.device_name.find(' ') + 1) : cpu_name();
  choice.threads = config.run.threads > 0 ? static_cast<int>(config.run.threads) : place.processors;
  choice.deterministic = config.run.deterministic;
  if (config.train.precision == "auto") {
    const std::string unit = absent   ? "a GPU with bf16 units assumed, none"
                             : on_gpu ? gpu_bf16_unit(gpu_index)
                                      : cpu_bf16_unit();
    choice.precision = unit.empty() ? Precision::kFp32 : Precision::kBf16;
    choice.precision_reason = unit.empty() ? "no bf16 matrix unit found" : unit + " found";
  } else {
    choice.precision = parse_precision(config.train.precision);
    choice.precision_reason = "as asked";
  }
  return choice;
}

void use_device(const DeviceChoice& choice) {
  at::set_num_threads(choice.threads);
#ifdef CRAM_CUDA
  if (choice.device.is_cuda() && at::hasCUDA()) c10::cuda::set_device(choice.device.index());
#endif
  if (choice.deterministic) {
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
    // Would fill every new tensor with NaN; ours are written before they are read.
    at::globalContext().setDeterministicFillUninitializedMemory(false);
  }
}

double free_memory_bytes(const DeviceChoice& choice) {
#ifdef CRAM_CUDA
  if (choice.device.is_cuda()) {
    std::size_t free = 0, total = 0;
    C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
    return static_cast<double>(free);
  }
#endif
  constexpr double kMost = 0.75;
  return kMost * available_memory_bytes() / choice.local_ranks;
}

void return_free_memory() {
  return_cpu_memory();
#ifdef CRAM_CUDA
  if (at::hasCUDA()) c10::cuda::CUDACachingAllocator::emptyCache();
#endif
}

void wait_for_device() {
#ifdef CRAM_CUDA
  if (at::hasCUDA()) c10::cuda::device_synchronize();
#endif
}

std::map<std::string, std::string> describe_environment(const DeviceChoice& choice, const Layout& layout) {
  return {{"cram", version()},
          {"build", build_description()},
          {"torch", TORCH_VERSION},
          {"threads", std::to_string(choice.threads)},
          {"cpu_capability", at::get_cpu_capability()},
          {"device", choice.device.str()},
          {"precision", precision_name(choice.precision)},
          {"layout", layout.text()},
          {"host", choice.host}};
}

}  // namespace cram
