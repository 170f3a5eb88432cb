// Bytes of JSON strings and numbers: which are plain, which are digits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/text/utf8.hpp"

namespace megapack {

// Bytes equal to `byte` become non-zero in their high bit (exact for the lowest such byte).
constexpr std::uint64_t bytes_equal(std::uint64_t word, std::uint8_t byte) {
    const std::uint64_t difference = word ^ (0x0101010101010101U * byte);
    return (difference - 0x0101010101010101U) & ~difference & kHighBits;
}

// The high bit of every byte that ends a plain run: quote, backslash, control, not ASCII.
constexpr std::uint64_t special_bytes(std::uint64_t word) {
    const std::uint64_t controls = (word - 0x2020202020202020U) & ~word & kHighBits;
    return bytes_equal(word, '"') | bytes_equal(word, '\\') | controls | (word & kHighBits);
}

// How many of the eight bytes in memory come before the first special one.
inline std::size_t plain_bytes(std::uint64_t word) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    const std::uint64_t special = special_bytes(word);
    return special == 0 ? 8 : static_cast<std::size_t>(__builtin_ctzll(special)) / 8;
#else
    return special_bytes(word) == 0 ? 8 : 0;  // the caller goes on byte by byte
#endif
}

// -1 where it is none.
inline int hex_digit(std::uint8_t c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

inline bool is_digit(std::uint8_t c) {
    return c >= '0' && c <= '9';
}

}  // namespace megapack
