// length_sorted: next_fit over the rests from short to long, equal lengths in file order.
#pragma once

#include "core/packing/strategy.hpp"

namespace megapack {

struct LengthSortedRules {
    std::int64_t capacity;
};

template <typename Id, typename Length>
Samples<Id, Length> pack_length_sorted(const Lengths<Length>& lengths,
                                       const LengthSortedRules& rules, const Run& run);

}  // namespace megapack
