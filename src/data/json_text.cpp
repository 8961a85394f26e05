#include "data/json_text.h"

#include <nlohmann/json.hpp>
#include <utility>

namespace cram {
namespace {

using Json = nlohmann::json;

class TextFinder : public nlohmann::json_sax<Json> {
 public:
  explicit TextFinder(std::string& text) : text_(text) {}
  [[nodiscard]] bool is_object() const { return is_object_; }
  [[nodiscard]] bool found() const { return found_; }

  bool null() override { return other_value(); }
  bool boolean(bool) override { return other_value(); }
  bool number_integer(number_integer_t) override { return other_value(); }
  bool number_unsigned(number_unsigned_t) override { return other_value(); }
  bool number_float(number_float_t, const string_t&) override { return other_value(); }
  bool binary(binary_t&) override { return other_value(); }
  bool string(string_t& value) override {
    if (depth_ == 1 && is_object_ && at_text_) {
      text_ = std::move(value);
      found_ = true;
      return true;
    }
    return other_value();
  }
  bool key(string_t& name) override {
    if (depth_ == 1) at_text_ = name == "text";
    return true;
  }
  bool start_object(std::size_t) override { return open(/*object=*/true); }
  bool start_array(std::size_t) override { return open(/*object=*/false); }
  bool end_object() override { return --depth_ >= 0; }
  bool end_array() override { return --depth_ >= 0; }
  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception&) override { return false; }

 private:
  bool open(bool object) {
    if (depth_ == 0) is_object_ = object;
    other_value();
    ++depth_;
    return true;
  }
  bool other_value() {
    if (depth_ == 1 && at_text_) found_ = false;
    return true;
  }

  std::string& text_;
  std::int64_t depth_ = 0;
  bool is_object_ = false;
  bool at_text_ = false;
  bool found_ = false;
};

}  // namespace

JsonText read_json_text(std::string_view line, std::string& text) {
  TextFinder finder(text);
  if (!Json::sax_parse(line.begin(), line.end(), &finder) || !finder.is_object()) return JsonText::kNotAnObject;
  return finder.found() ? JsonText::kOk : JsonText::kNoText;
}

}  // namespace cram
