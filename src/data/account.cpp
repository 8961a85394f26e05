#include "data/account.h"

#include <algorithm>

#include "base/check.h"

namespace cram {
namespace {

void add(Account::Amount& amount, std::int64_t bytes, std::int64_t documents) {
  amount.bytes += bytes;
  amount.documents += documents;
}

std::string amount_text(const Account::Amount& amount) {
  return concat(with_commas(amount.bytes), " bytes, ", with_commas(amount.documents), " documents");
}

}  // namespace

void Account::take(std::int64_t bytes, std::int64_t documents) { add(input_, bytes, documents); }
void Account::keep(std::int64_t bytes, std::int64_t documents) { add(kept_, bytes, documents); }

void Account::drop(std::string_view reason, std::int64_t bytes, std::int64_t documents) {
  if (bytes == 0 && documents == 0) return;
  const auto found =
      std::find_if(dropped_.begin(), dropped_.end(), [&](const auto& row) { return row.first == reason; });
  if (found != dropped_.end()) return add(found->second, bytes, documents);
  dropped_.emplace_back(reason, Amount{bytes, documents});
}

Account::Amount Account::dropped() const {
  Amount sum;
  for (const auto& [reason, amount] : dropped_) add(sum, amount.bytes, amount.documents);
  return sum;
}

Account::Amount Account::dropped_for(std::string_view reason) const {
  for (const auto& [name, amount] : dropped_) {
    if (name == reason) return amount;
  }
  return {};
}

bool Account::balances() const {
  Amount sum = dropped();
  add(sum, kept_.bytes, kept_.documents);
  return sum == input_;
}

std::string Account::text() const {
  std::string line = concat(stage_, ": input ", amount_text(input_), " = kept ", amount_text(kept_), " + dropped ",
                            amount_text(dropped()));
  for (std::size_t i = 0; i < dropped_.size(); ++i) {
    const auto& [reason, amount] = dropped_[i];
    line += concat(i == 0 ? " (" : "; ", reason, " ", with_commas(amount.bytes), " bytes");
    if (amount.documents > 0) line += concat(" in ", with_commas(amount.documents), " documents");
  }
  if (!dropped_.empty()) line += ")";
  CRAM_CHECK(balances(), ExitCode::kOther, "this program's books do not balance: ", line);
  return line;
}

std::string with_commas(std::int64_t value) {
  const std::string digits = std::to_string(value);
  const std::size_t first = value < 0 ? 1 : 0;
  std::string out;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i > first && (digits.size() - i) % 3 == 0) out.push_back(',');
    out.push_back(digits[i]);
  }
  return out;
}

}  // namespace cram
