// A table of named rows that tests and programs may add to before options are parsed: how a door knows what goes
// through it.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "base/check.h"

namespace cram {

/// `Row` has a member `name`. A table is filled before threads start and read by all of them.
template <class Row>
class Table {
 public:
  /// `what` names a row in messages: "objective".
  Table(std::string what, std::vector<Row> rows) : what_(std::move(what)), rows_(std::move(rows)) {}

  /// Throws Error(kUsage) when the name is taken.
  void add(Row row) {
    CRAM_CHECK(find(row.name) == nullptr, ExitCode::kUsage, "there is already a ", what_, " called ", row.name);
    rows_.push_back(std::move(row));
  }
  [[nodiscard]] const Row* find(const std::string& name) const {
    for (const Row& row : rows_) {
      if (name == row.name) return &row;
    }
    return nullptr;
  }
  /// Throws Error(kUsage) naming the rows there are.
  [[nodiscard]] const Row& at(const std::string& name) const {
    const Row* row = find(name);
    if (row != nullptr) return *row;
    std::string known;
    for (const std::string& each : names()) known += (known.empty() ? "" : ", ") + each;
    fail(ExitCode::kUsage, "no ", what_, " is called ", name, "; known: ", known);
  }
  [[nodiscard]] std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const Row& row : rows_) names.emplace_back(row.name);
    return names;
  }
  [[nodiscard]] const std::vector<Row>& rows() const { return rows_; }

 private:
  std::string what_;
  std::vector<Row> rows_;
};

}  // namespace cram
