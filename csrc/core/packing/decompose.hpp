// Dataset Decomposition (Pouransari et al. 2024): documents cut by the binary digits of their
// length.
#pragma once

#include "core/packing/types.hpp"

namespace megapack {

// Every document gives pieces of 2^k tokens, one per binary digit of its length, largest first; the
// digits above the largest bucket become repeats of it, the digits below the smallest are dropped.
// A piece is a sample. `capacities` are all powers of two from the smallest bucket to the largest.
template <typename Id, typename Length>
Samples<Id, Length> pack_decompose(const Documents<Id, Length>& documents,
                                   const std::vector<std::int64_t>& capacities, const Run& run);

}  // namespace megapack
