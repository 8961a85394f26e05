#include "parallel/agreement.h"

#include <torch/types.h>

#include <optional>

#include "base/check.h"

namespace cram {

std::string broadcast_text(Communicator& group, const std::string& text) {
  if (group.size() == 1) return text;
  const at::Tensor length = at::full({1}, static_cast<std::int64_t>(text.size()), at::kLong);
  group.broadcast_(length, 0);
  const at::Tensor bytes = at::empty({length.item<std::int64_t>()}, at::kByte);
  if (group.rank() == 0) std::copy(text.begin(), text.end(), static_cast<char*>(bytes.data_ptr()));
  group.broadcast_(bytes, 0);
  const auto* first = static_cast<const char*>(bytes.const_data_ptr());
  return std::string(first, first + bytes.numel());
}

std::vector<std::string> gather_text(Communicator& group, const std::string& text) {
  const at::Tensor lengths = at::empty({group.size()}, at::kLong);
  group.all_gather(lengths, at::full({1}, static_cast<std::int64_t>(text.size()), at::kLong));
  const auto longest = lengths.max().item<std::int64_t>();
  const at::Tensor mine = at::zeros({longest}, at::kByte);
  std::copy(text.begin(), text.end(), static_cast<char*>(mine.data_ptr()));
  const at::Tensor all = at::empty({group.size(), longest}, at::kByte);
  group.all_gather(all, mine);
  std::vector<std::string> texts;
  for (std::int64_t r = 0; r < group.size(); ++r) {
    const auto* first = static_cast<const char*>(all.const_data_ptr()) + r * longest;
    texts.emplace_back(first, first + lengths[r].item<std::int64_t>());
  }
  return texts;
}

std::vector<std::string> gather_text_to_root(Communicator& group, const std::string& text) {
  if (group.size() == 1) return {text};
  const auto length_of = [](const std::string& of) { return static_cast<std::int64_t>(of.size()); };
  const at::Tensor lengths = at::empty({group.size()}, at::kLong);
  group.all_gather(lengths, at::full({1}, length_of(text), at::kLong));
  std::vector<Message> sends, receives;
  if (group.rank() > 0) {
    if (text.empty()) return {};
    const at::Tensor mine = at::empty({length_of(text)}, at::kByte);
    std::copy(text.begin(), text.end(), static_cast<char*>(mine.data_ptr()));
    sends.push_back({0, mine});
  } else {
    for (int r = 1; r < group.size(); ++r) {
      const auto length = lengths[r].item<std::int64_t>();
      if (length > 0) receives.push_back({r, at::empty({length}, at::kByte)});
    }
  }
  group.exchange_(sends, receives);
  if (group.rank() > 0) return {};
  std::vector<std::string> texts(static_cast<std::size_t>(group.size()));
  texts[0] = text;
  for (const Message& message : receives) {
    const auto* first = static_cast<const char*>(message.tensor.const_data_ptr());
    texts[static_cast<std::size_t>(message.peer)] = std::string(first, first + message.tensor.numel());
  }
  return texts;
}

void on_root(Communicator& group, const std::function<void()>& action) {
  std::optional<Error> failure;
  if (group.rank() == 0) {
    try {
      action();
    } catch (const Error& error) {
      failure = error;
    }
  }
  const std::int64_t code = agree_on_largest(group, failure ? static_cast<std::int64_t>(failure->code()) : 0);
  if (failure) throw Error(*failure);
  if (code != 0) fail(static_cast<ExitCode>(code), "rank 0 of group ", group.name(), " failed, see its message");
}

std::int64_t agree_on_largest(Communicator& group, std::int64_t value) { return PendingLargest(group, value).wait(); }

PendingLargest::PendingLargest(Communicator& group, std::int64_t value) : largest_(at::full({1}, value, at::kLong)) {
  if (group.size() > 1) work_ = group.all_reduce_async_(largest_, ReduceOp::kMax);
}

std::int64_t PendingLargest::wait() {
  work_.wait();
  return largest_.item<std::int64_t>();
}

double broadcast_value(Communicator& group, double value) {
  if (group.size() == 1) return value;
  const at::Tensor shared = at::full({1}, value, at::kDouble);
  group.broadcast_(shared, 0);
  return shared.item<double>();
}

}  // namespace cram
