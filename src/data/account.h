// What came in, what went on and what was left out, and why: every stage of preparation prints one.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cram {

/// Bytes and documents of one stage. `take` is called where the input is counted and `keep` and `drop` where its fate
/// is decided, so that input = kept + dropped is a check and not a definition.
class Account {
 public:
  struct Amount {
    std::int64_t bytes = 0;
    std::int64_t documents = 0;
    bool operator==(const Amount&) const = default;
  };

  explicit Account(std::string stage) : stage_(std::move(stage)) {}

  void take(std::int64_t bytes, std::int64_t documents = 0);
  void keep(std::int64_t bytes, std::int64_t documents = 0);
  /// Nothing is recorded for a reason without an amount.
  void drop(std::string_view reason, std::int64_t bytes, std::int64_t documents = 0);

  [[nodiscard]] const Amount& input() const { return input_; }
  [[nodiscard]] const Amount& kept() const { return kept_; }
  [[nodiscard]] Amount dropped() const;
  [[nodiscard]] Amount dropped_for(std::string_view reason) const;
  [[nodiscard]] bool balances() const;
  /// "read: input 42 bytes, 2 documents = kept 40 bytes, 2 documents + dropped 2 bytes, 0 documents (blank lines 2
  /// bytes)". Error(kOther) when it does not balance: that is a fault of this program.
  [[nodiscard]] std::string text() const;

 private:
  std::string stage_;
  Amount input_;
  Amount kept_;
  std::vector<std::pair<std::string, Amount>> dropped_;  // in order of first use
};

/// 1234567 -> "1,234,567".
[[nodiscard]] std::string with_commas(std::int64_t value);

}  // namespace cram
