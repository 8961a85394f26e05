// XXH3-128 content digests. They guard against accidents (torn writes, flipped bits), not against an adversary.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace cram {

/// 32 lower-case hexadecimal digits of the XXH3-128 digest.
[[nodiscard]] std::string digest_bytes(const void* data, std::size_t bytes);
[[nodiscard]] inline std::string digest_text(std::string_view text) { return digest_bytes(text.data(), text.size()); }
/// Digest of a whole file. Throws Error(code) when the file cannot be read.
[[nodiscard]] std::string digest_file(const std::string& path);
/// 64-bit XXH3 of a text: keys for random streams ("parameter name", "document") and deduplication.
[[nodiscard]] std::uint64_t hash64(std::string_view text, std::uint64_t seed = 0) noexcept;

/// Streaming form of `digest_bytes`.
class Digest {
 public:
  Digest();
  ~Digest();
  Digest(Digest&&) noexcept;
  Digest& operator=(Digest&&) noexcept;
  void update(const void* data, std::size_t bytes);
  [[nodiscard]] std::string hex() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace cram
