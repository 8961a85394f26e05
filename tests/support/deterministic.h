// What run.deterministic sets, for the length of a test.
#pragma once

#include <ATen/Context.h>

#include <cstdlib>

namespace cram::test {

class Deterministic {
 public:
  Deterministic() : before_(at::globalContext().deterministicAlgorithms()) {
    ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);  // ATen's own products refuse without it
    // Flash attention's backward pass takes a mere warning for a no.
    at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  }
  ~Deterministic() { at::globalContext().setDeterministicAlgorithms(before_, /*warn_only=*/false); }
  Deterministic(const Deterministic&) = delete;
  Deterministic& operator=(const Deterministic&) = delete;

 private:
  bool before_;
};

}  // namespace cram::test
