// Dataset Decomposition (Pouransari et al. 2024): documents cut by the binary digits of their
// length.
#pragma once

#include <vector>

#include "core/packing/strategy.hpp"

namespace megapack {

struct DecomposeRules {
    std::vector<std::int64_t> capacities;  // all powers of two from the smallest to the largest
};

// Every document gives pieces of 2^k tokens, one per binary digit of its length, largest first; the
// digits above the largest bucket become repeats of it, the digits below the smallest are dropped.
// A piece is a sample.
template <typename Id, typename Length>
Samples<Id, Length> pack_decompose(const Lengths<Length>& lengths, const DecomposeRules& rules,
                                   const Run& run);

}  // namespace megapack
