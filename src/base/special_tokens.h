// The five ids that are no text. Every vocabulary of this project begins with them.
#pragma once

#include <cstdint>

namespace cram {

inline constexpr std::uint32_t kPadId = 0;
inline constexpr std::uint32_t kUnkId = 1;
inline constexpr std::uint32_t kClsId = 2;
inline constexpr std::uint32_t kSepId = 3;
inline constexpr std::uint32_t kMaskId = 4;
inline constexpr std::uint32_t kSpecialTokens = 5;  ///< ids below this one are special
inline constexpr const char* kSpecialPieces[kSpecialTokens] = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"};

}  // namespace cram
