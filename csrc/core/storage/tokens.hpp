// Range of token ids, and their narrowing to the type of the file.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>

#include "core/base/check.hpp"
#include "core/base/span.hpp"

namespace megapack {

// Returns the smallest and the largest id; without tokens {largest T, smallest T}, which passes any
// limits.
template <typename T>
std::pair<T, T> token_range(Span<const T> tokens) {
    // Local accumulators: the compiler then keeps them in vector registers.
    T low = std::numeric_limits<T>::max();
    T high = std::numeric_limits<T>::min();
    for (const T token : tokens) {
        low = std::min(low, token);
        high = std::max(high, token);
    }
    return {low, high};
}

// Copies tokens to out. The caller checked with token_range that every id fits To.
template <typename From, typename To>
void narrow_tokens(Span<const From> tokens, Span<To> out) {
    check(out.size() == tokens.size(), "out has ", out.size(), " elements; it must have ",
          tokens.size());
    for (std::int64_t i = 0; i < tokens.size(); ++i) out[i] = static_cast<To>(tokens[i]);
}

}  // namespace megapack
