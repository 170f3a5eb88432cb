// Seeded orders of documents: a full shuffle, and a random deal into pools.
#pragma once

#include "core/base/random.hpp"
#include "core/packing/types.hpp"

namespace megapack {

template <typename Id, typename Length>
struct Dealt {
    Buffer<Item<Id, Length>> items;    // group after group
    std::vector<std::size_t> offsets;  // of the groups in `items`, one more than groups
};

// Document i goes to group chance.below(i, num_groups); a group keeps file order.
template <typename Id, typename Length>
Dealt<Id, Length> deal(Span<const Length> lengths, std::size_t num_groups, Random chance,
                       int threads);

// A uniformly random order. Documents are dealt with chance.child(0) to
// G = min(4096, ceil(n / 32768)) groups; inside group g, for k = size - 1 ... 1, position k is
// swapped with position chance.child(1).child(g).below(k, k + 1) (Fisher and Yates). The groups
// fit in a processor's cache, which a shuffle of the whole would not.
template <typename Id, typename Length>
Buffer<Item<Id, Length>> shuffle(Span<const Length> lengths, Random chance, int threads);

}  // namespace megapack
