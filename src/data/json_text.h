// The string `text` of one JSON line, without building the rest of the object.
#pragma once

#include <string>
#include <string_view>

namespace cram {

enum class JsonText { kOk, kNotAnObject, kNoText };

/// `text` is set when kOk. Depth does not matter to memory or stack; of several `text` keys the last counts.
[[nodiscard]] JsonText read_json_text(std::string_view line, std::string& text);

}  // namespace cram
