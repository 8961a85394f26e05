// Which device and number format a run uses, and why: the first line a run prints.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

#include "model/parameter_store.h"
#include "parallel/launch.h"
#include "parallel/mesh.h"
#include "train/train_config.h"

namespace cram {

struct DeviceChoice {
  at::Device device = at::Device(at::kCPU);
  Precision precision = Precision::kFp32;
  int threads = 1;
  int local_ranks = 1;           ///< ranks that share this machine
  std::string host;              ///< name of this machine
  std::string device_name;       ///< "cpu", "cuda:1 NVIDIA H100"
  std::string model_name;        ///< "AMD EPYC (AVX512-BF16)", "NVIDIA H100": the same for every one of its kind
  std::string precision_reason;  ///< "AVX512-BF16 found"
  bool deterministic = false;    ///< only kernels that give the same bits every time

  /// One line for the person who runs it.
  [[nodiscard]] std::string text() const;
};

/// Where a process runs.
struct MachinePlace {
  int processors = 1;   ///< how many it may use
  int local_rank = 0;   ///< which of this machine's GPUs is its own (all the same one where there are fewer)
  int local_ranks = 1;  ///< that share this machine
};
/// A rank alone on its machine takes all processors, whatever its launcher bound it to; others their part.
[[nodiscard]] MachinePlace machine_place(const Launch& launch);

/// What run.device, run.threads and train.precision are here ("auto": bf16 on sm_80+, AMX or AVX512-BF16, else fp32).
/// `plans`: nothing will run, so that a GPU asked for need not be there (bf16 is assumed for it).
[[nodiscard]] DeviceChoice propose_device(const Config& config, const MachinePlace& place, bool plans = false);

/// Sets what of a choice belongs to this process: its current GPU, torch's threads, deterministic kernels.
void use_device(const DeviceChoice& choice);

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
