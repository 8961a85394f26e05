// Version of this build, as `--version` prints it and as checkpoints and run folders record it.
#pragma once

#include <string>

namespace cram {

/// "0.1.0"
[[nodiscard]] std::string version();
/// "cram_train 0.1.0 (GNU 12.2.0, Release, torch 2.11.0, CUDA on)" and the licence line.
[[nodiscard]] std::string version_line(const std::string& program);
/// Compiler, build type and CUDA switch: what can change bits between two builds of one version.
[[nodiscard]] std::string build_description();

}  // namespace cram
