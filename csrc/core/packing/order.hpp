// Seeded orders of documents: a full shuffle, and a random deal into pools.
#pragma once

#include "core/base/buffer.hpp"
#include "core/base/random.hpp"
#include "core/packing/documents.hpp"
#include "core/packing/run.hpp"

namespace megapack {

template <typename Id, typename Length>
struct Dealt {
    Buffer<Item<Id, Length>> items;     // group after group
    std::vector<std::int64_t> offsets;  // of the groups in `items`, one more than groups
};

// Document i goes to group chance.below(i, num_groups); a group keeps file order.
template <typename Id, typename Length>
Dealt<Id, Length> deal(Span<const Length> lengths, std::int64_t num_groups, Random chance,
                       int threads);

// A uniformly random order. Documents are dealt with chance.child(0) to
// G = min(4096, ceil(n / 32768)) groups; inside group g, for k = size - 1 ... 1, position k is
// swapped with position chance.child(1).child(g).below(k, k + 1) (Fisher and Yates). The groups
// fit in a processor's cache, which a shuffle of the whole would not.
template <typename Id, typename Length>
Buffer<Item<Id, Length>> shuffle(Span<const Length> lengths, Random chance, int threads);

// pack(documents) on the documents in file order or, if asked, in seeded order.
template <typename Id, typename Length, typename Pack>
auto pack_in_order(const Lengths<Length>& lengths, bool shuffled, const Run& run, Pack pack) {
    Documents<Id, Length> documents = in_file_order<Id>(lengths);
    if (!shuffled) return pack(documents);
    const auto order = shuffle<Id, Length>(documents.lengths,
                                           random_for(run.seed, Purpose::kDocuments), run.threads);
    documents.items = order.data();
    return pack(documents);
}

}  // namespace megapack
