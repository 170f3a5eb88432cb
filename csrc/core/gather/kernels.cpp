#include "core/gather/kernels.hpp"

#include <algorithm>

// GCC makes one copy of a function per instruction set and picks one when the library is loaded,
// which needs glibc's indirect functions. Elsewhere there is the one copy for the baseline. All
// arithmetic is on integers: the copies differ in speed only.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#if __GNUC__ >= 12
#define MEGAPACK_CLONES __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define MEGAPACK_CLONES __attribute__((target_clones("avx2", "default")))
#endif
#else
#define MEGAPACK_CLONES
#endif

#define MEGAPACK_INLINE inline __attribute__((always_inline))

namespace megapack {
namespace {

template <typename T>
MEGAPACK_INLINE void widen_loop(const T* from, std::int64_t count, std::int64_t* to) {
    for (std::int64_t i = 0; i < count; ++i) to[i] = static_cast<std::int64_t>(from[i]);
}

using Out = std::int64_t*;

// One per type, because a template cannot be cloned.
MEGAPACK_CLONES void widen_each(const std::uint8_t* from, std::int64_t count, Out to) {
    widen_loop(from, count, to);
}
MEGAPACK_CLONES void widen_each(const std::int8_t* from, std::int64_t count, Out to) {
    widen_loop(from, count, to);
}
MEGAPACK_CLONES void widen_each(const std::int16_t* from, std::int64_t count, Out to) {
    widen_loop(from, count, to);
}
MEGAPACK_CLONES void widen_each(const std::uint16_t* from, std::int64_t count, Out to) {
    widen_loop(from, count, to);
}
MEGAPACK_CLONES void widen_each(const std::int32_t* from, std::int64_t count, Out to) {
    widen_loop(from, count, to);
}
MEGAPACK_CLONES void widen_each(const std::int64_t* from, std::int64_t count, Out to) {
    widen_loop(from, count, to);
}

// Calls f with a typed pointer to element `at`.
template <typename F>
auto with_type(const TokenArray& array, std::int64_t at, F f) {
    switch (array.type) {
        case TokenType::kUint8:
            return f(static_cast<const std::uint8_t*>(array.data) + at);
        case TokenType::kInt8:
            return f(static_cast<const std::int8_t*>(array.data) + at);
        case TokenType::kInt16:
            return f(static_cast<const std::int16_t*>(array.data) + at);
        case TokenType::kUint16:
            return f(static_cast<const std::uint16_t*>(array.data) + at);
        case TokenType::kInt32:
            return f(static_cast<const std::int32_t*>(array.data) + at);
        case TokenType::kInt64:
            break;
    }
    return f(static_cast<const std::int64_t*>(array.data) + at);
}

constexpr std::int64_t kLine = 64;  // bytes of a cache line
// Of a long run the beginning is enough: the processor sees the stream and goes on by itself.
constexpr std::int64_t kMostAhead = 16384;

}  // namespace

void prefetch(const TokenArray& from, std::int64_t at, std::int64_t count) {
    const std::int64_t itemsize = bytes_of(from.type);
    const auto* begin = static_cast<const unsigned char*>(from.data) + at * itemsize;
    const std::int64_t size = std::min(count * itemsize, kMostAhead);
    for (std::int64_t byte = 0; byte < size; byte += kLine) __builtin_prefetch(begin + byte);
}

void widen(const TokenArray& from, std::int64_t at, std::int64_t count, std::int64_t* to) {
    with_type(from, at, [=](const auto* tokens) { widen_each(tokens, count, to); });
}

void widen_chosen(const TokenArray& from, std::int64_t at, std::int64_t count, std::int64_t* to,
                  float* mask) {
    with_type(from, at, [=](const auto* chosen) {
        for (std::int64_t i = 0; i < count; ++i) {
            const auto label = static_cast<std::int64_t>(chosen[i]);
            to[i] = label < 0 ? kNoLabel : label;
            mask[i] = label < 0 ? 0.0F : 1.0F;
        }
    });
}

std::int64_t count_chosen(const TokenArray& from, std::int64_t at, std::int64_t count) {
    return with_type(from, at, [=](const auto* chosen) {
        std::int64_t total = 0;
        for (std::int64_t i = 0; i < count; ++i) total += static_cast<std::int64_t>(chosen[i]) >= 0;
        return total;
    });
}

MEGAPACK_CLONES void count_up(std::int64_t first, std::int64_t count, std::int64_t* to) {
    for (std::int64_t i = 0; i < count; ++i) to[i] = first + i;
}

MEGAPACK_CLONES void fill(std::int64_t value, std::int64_t count, std::int64_t* to) {
    for (std::int64_t i = 0; i < count; ++i) to[i] = value;
}

MEGAPACK_CLONES void fill(float value, std::int64_t count, float* to) {
    for (std::int64_t i = 0; i < count; ++i) to[i] = value;
}

}  // namespace megapack
