// Which device and number format a run uses, and why: the first line a run prints.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

#include "model/parameter_store.h"
#include "parallel/mesh.h"
#include "train/train_config.h"

namespace cram {

struct DeviceChoice {
  at::Device device = at::Device(at::kCPU);
  Precision precision = Precision::kFp32;
  int threads = 1;
  int local_ranks = 1;      ///< ranks that share this machine
  std::string host;         ///< name of this machine
  std::string device_name;  ///< "cpu", "cuda:1 NVIDIA H100"
  std::string model_name;   ///< "AMD EPYC (AVX512-BF16)", "NVIDIA H100": the same for every one of its kind
  std::string reason;       ///< one line for the person who runs it
};

/// Resolves run.device, run.threads and train.precision ("auto": bf16 on sm_80+, AMX or AVX512-BF16, else fp32), writes
/// the resolved values back and sets torch's thread count. `processors`: how many this process may use; `local_rank`
/// of `local_ranks`: which of this machine's GPUs is its own (all the same one where there are fewer). `plans`: nothing
/// will run, so that a GPU asked for need not be there (bf16 is assumed for it).
[[nodiscard]] DeviceChoice choose_device(Config& config, int processors, int local_rank, int local_ranks = 1,
                                         bool plans = false);

/// Bytes a rank may still take for activations: of the GPU what is free; of the machine's memory three quarters of this
/// rank's part.
[[nodiscard]] double free_memory_bytes(const DeviceChoice& choice);

/// Gives the memory that earlier tensors left with the allocators back: host and GPU.
void return_free_memory();

/// Returns when this thread's current GPU has done all that it was given; at once where there is none. For clocks.
void wait_for_device();

/// Build, library versions and whatever can change bits (threads, instruction set, device, layout).
[[nodiscard]] std::map<std::string, std::string> describe_environment(const DeviceChoice& choice, const Layout& layout);

}  // namespace cram
