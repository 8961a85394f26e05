// Micro-batches that a function makes.
#pragma once

#include <functional>
#include <utility>

#include "data/batch_source.h"

namespace cram::test {

class CallSource final : public BatchSource {
 public:
  explicit CallSource(std::function<Batch()> make) : make_(std::move(make)) {}
  Batch next() override { return make_(); }

 private:
  std::function<Batch()> make_;
};

}  // namespace cram::test
