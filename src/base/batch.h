// What a training step eats: one micro-batch as tensors with names, so that another objective's fields travel the same
// way as these. Header only: `base` itself links no tensor library.
//
// Legend: B rows, S tokens a row, M positions that the loss looks at.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"

namespace cram {

/// The fields that exist so far; int64 all of them.
namespace field {
inline constexpr std::string_view kIds = "ids";              ///< [B,S] tokens as the model sees them
inline constexpr std::string_view kLengths = "lengths";      ///< [B] real tokens of a row; absent: every row is full
inline constexpr std::string_view kPositions = "positions";  ///< [M] flat index b*S+s, ascending
inline constexpr std::string_view kLabels = "labels";        ///< [M] the original ids at the positions
}  // namespace field

class Batch {
 public:
  struct Field {
    std::string name;
    at::Tensor tensor;
  };

  std::int64_t rows = 0;        ///< B
  std::int64_t seq_length = 0;  ///< S

  Batch() = default;
  Batch(std::int64_t rows_of, std::int64_t seq_of, std::vector<Field> fields = {})
      : rows(rows_of), seq_length(seq_of), fields_(std::move(fields)) {}

  [[nodiscard]] std::int64_t tokens() const { return rows * seq_length; }
  /// Undefined where the batch has no such field.
  [[nodiscard]] at::Tensor find(std::string_view name) const {
    for (const Field& field : fields_) {
      if (field.name == name) return field.tensor;
    }
    return {};
  }
  /// Throws Error(kOther) naming the fields there are.
  [[nodiscard]] const at::Tensor& operator[](std::string_view name) const {
    std::string known;
    for (const Field& field : fields_) {
      if (field.name == name) return field.tensor;
      known += " " + field.name;
    }
    fail(ExitCode::kOther, "a batch has no field ", std::string(name), ", it has:", known);
  }
  void set(std::string_view name, at::Tensor tensor) {
    for (Field& field : fields_) {
      if (field.name != name) continue;
      field.tensor = std::move(tensor);
      return;
    }
    fields_.push_back({std::string(name), std::move(tensor)});
  }
  [[nodiscard]] const std::vector<Field>& fields() const { return fields_; }

  /// The same fields, each made by `change(tensor)`.
  template <class Change>
  [[nodiscard]] Batch map(const Change& change) const {
    Batch made(rows, seq_length);
    for (const Field& field : fields_) made.fields_.push_back({field.name, change(field.tensor)});
    return made;
  }

 private:
  std::vector<Field> fields_;
};

}  // namespace cram
