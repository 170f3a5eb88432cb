// UTF-8 as Unicode defines it: no overlong forms, no surrogates, nothing above U+10FFFF. Accepts
// the same bytes as Python's strict decoder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/base/span.hpp"

namespace megapack {

// Returns the bytes (1 to 4) of the character at p, or 0 if it is invalid.
inline std::size_t utf8_character(const std::uint8_t* p, const std::uint8_t* end) {
    const auto continues = [&](std::size_t i) { return (p[i] & 0xC0U) == 0x80U; };
    const auto room = static_cast<std::size_t>(end - p);
    if (room == 0) return 0;
    const std::uint8_t lead = p[0];
    if (lead < 0x80) return 1;
    if (lead < 0xC2) return 0;
    if (lead < 0xE0) return room >= 2 && continues(1) ? 2 : 0;
    if (lead < 0xF0) {
        if (room < 3 || !continues(1) || !continues(2)) return 0;
        if (lead == 0xE0 && p[1] < 0xA0) return 0;  // overlong
        if (lead == 0xED && p[1] > 0x9F) return 0;  // surrogate
        return 3;
    }
    if (lead > 0xF4 || room < 4 || !continues(1) || !continues(2) || !continues(3)) return 0;
    if (lead == 0xF0 && p[1] < 0x90) return 0;  // overlong
    if (lead == 0xF4 && p[1] > 0x8F) return 0;  // above U+10FFFF
    return 4;
}

inline std::uint64_t load_8_bytes(const std::uint8_t* p) {
    std::uint64_t word = 0;
    std::memcpy(&word, p, sizeof(word));
    return word;
}

inline constexpr std::uint64_t kHighBits = 0x8080808080808080U;

inline bool is_utf8(Span<const std::uint8_t> text) {
    const std::uint8_t* p = text.begin();
    while (p != text.end()) {
        if (text.end() - p >= 8 && (load_8_bytes(p) & kHighBits) == 0) {
            p += 8;
            continue;
        }
        const std::size_t length = utf8_character(p, text.end());
        if (length == 0) return false;
        p += length;
    }
    return true;
}

// Writes code point c (1 to 4 bytes); returns the position after it.
inline std::uint8_t* write_utf8(std::uint32_t c, std::uint8_t* out) {
    const auto tail = [&](int shift) {
        return static_cast<std::uint8_t>(0x80U | ((c >> shift) & 0x3FU));
    };
    if (c < 0x80) {
        *out++ = static_cast<std::uint8_t>(c);
    } else if (c < 0x800) {
        *out++ = static_cast<std::uint8_t>(0xC0U | (c >> 6));
        *out++ = tail(0);
    } else if (c < 0x10000) {
        *out++ = static_cast<std::uint8_t>(0xE0U | (c >> 12));
        *out++ = tail(6);
        *out++ = tail(0);
    } else {
        *out++ = static_cast<std::uint8_t>(0xF0U | (c >> 18));
        *out++ = tail(12);
        *out++ = tail(6);
        *out++ = tail(0);
    }
    return out;
}

}  // namespace megapack
