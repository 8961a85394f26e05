#include "run/tensorboard.h"

#include <unistd.h>

#include <array>
#include <bit>
#include <chrono>
#include <cstring>

#include "base/check.h"
#include "base/file_io.h"

namespace cram {
namespace {

constexpr std::array<std::uint32_t, 256> make_crc_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1U) != 0 ? 0x82f63b78U : 0U);
    table[i] = value;
  }
  return table;
}

template <class T>
std::string little_endian(T value) {
  static_assert(std::endian::native == std::endian::little);
  std::string bytes(sizeof value, '\0');
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}

std::string varint(std::uint64_t value) {
  std::string bytes;
  while (value >= 0x80) {
    bytes += static_cast<char>(value | 0x80);
    value >>= 7;
  }
  return bytes + static_cast<char>(value);
}

// Protobuf fields: key = number << 3 | wire type (0 varint, 1 eight bytes, 2 length-delimited, 5 four bytes).
std::string field_text(int number, const std::string& text) {
  return varint(static_cast<std::uint64_t>(number) << 3 | 2) + varint(text.size()) + text;
}
std::string field_double(int number, double value) {
  return varint(static_cast<std::uint64_t>(number) << 3 | 1) + little_endian(value);
}
std::string field_float(int number, float value) {
  return varint(static_cast<std::uint64_t>(number) << 3 | 5) + little_endian(value);
}
std::string field_integer(int number, std::int64_t value) {
  return varint(static_cast<std::uint64_t>(number) << 3) + varint(static_cast<std::uint64_t>(value));
}

double now_s() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

std::string masked_crc(const std::string& bytes) {
  const std::uint32_t crc = crc32c(bytes.data(), bytes.size());
  return little_endian(((crc >> 15) | (crc << 17)) + 0xa282ead8U);
}

}  // namespace

std::uint32_t crc32c(const void* data, std::size_t bytes) noexcept {
  static constexpr std::array<std::uint32_t, 256> kTable = make_crc_table();
  const auto* byte = static_cast<const unsigned char*>(data);
  std::uint32_t crc = 0xffffffffU;
  for (std::size_t i = 0; i < bytes; ++i) crc = (crc >> 8) ^ kTable[(crc ^ byte[i]) & 0xffU];
  return ~crc;
}

TensorBoardWriter::TensorBoardWriter(const std::string& folder) {
  make_folders(folder);
  const std::string path =
      concat(folder, "/events.out.tfevents.", static_cast<std::int64_t>(now_s()), ".cram.", ::getpid());
  file_.reset(std::fopen(path.c_str(), "ab"));
  CRAM_CHECK(file_, ExitCode::kOther, "cannot create ", path);
  write_record(field_double(1, now_s()) + field_text(3, "brain.Event:2"));  // Event{wall_time, file_version}
}

void TensorBoardWriter::scalar(const std::string& tag, std::int64_t step, double value) {
  // Event{wall_time=1, step=2, summary=5{value=1{tag=1, simple_value=2}}}
  const std::string entry = field_text(1, tag) + field_float(2, static_cast<float>(value));
  write_record(field_double(1, now_s()) + field_integer(2, step) + field_text(5, field_text(1, entry)));
}

void TensorBoardWriter::write_record(const std::string& message) {
  const std::string length = little_endian(static_cast<std::uint64_t>(message.size()));
  const std::string record = length + masked_crc(length) + message + masked_crc(message);
  std::fwrite(record.data(), 1, record.size(), file_.get());
}

void TensorBoardWriter::flush() { std::fflush(file_.get()); }

}  // namespace cram
