#include "base/digest.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstdio>
#include <utility>
#include <vector>

#include "base/check.h"

namespace cram {
namespace {

std::string to_hex(XXH128_hash_t value) {
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(value.high64),
                static_cast<unsigned long long>(value.low64));
  return text;
}

}  // namespace

struct Digest::State {
  XXH3_state_t xxh;
};

// The state must be 64-byte aligned, which a plain `new` of an over-aligned type honours since C++17.
Digest::Digest() : state_(std::make_unique<State>()) { XXH3_128bits_reset(&state_->xxh); }
Digest::~Digest() = default;
Digest::Digest(Digest&&) noexcept = default;
Digest& Digest::operator=(Digest&&) noexcept = default;

void Digest::update(const void* data, std::size_t bytes) {
  if (bytes > 0) XXH3_128bits_update(&state_->xxh, data, bytes);
}

std::string Digest::hex() const { return to_hex(XXH3_128bits_digest(&state_->xxh)); }

std::string digest_bytes(const void* data, std::size_t bytes) { return to_hex(XXH3_128bits(data, bytes)); }

std::string digest_file(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "rb");
  CRAM_CHECK(file != nullptr, ExitCode::kOther, "cannot read ", path, ": the file is missing or not readable");
  Digest digest;
  std::vector<char> block(1 << 20);
  std::size_t got = 0;
  while ((got = std::fread(block.data(), 1, block.size(), file)) > 0) digest.update(block.data(), got);
  const bool failed = std::ferror(file) != 0;
  std::fclose(file);
  CRAM_CHECK(!failed, ExitCode::kOther, "reading ", path, " failed part way");
  return digest.hex();
}

std::uint64_t hash64(std::string_view text, std::uint64_t seed) noexcept {
  return XXH3_64bits_withSeed(text.data(), text.size(), seed);
}

}  // namespace cram
