#include "core/packing/bucket_naive.hpp"

#include "core/packing/order.hpp"
#include "core/packing/stream.hpp"

namespace megapack {

template <typename Id, typename Length>
Samples<Id, Length> pack_bucket_naive(const Lengths<Length>& lengths, const BucketNaiveRules& rules,
                                      const Run& run) {
    check_capacities(rules.capacities);
    return pack_in_order<Id>(lengths, rules.shuffle, run, [&](const auto& documents) {
        return pack_streams(documents, rules.capacities, run);
    });
}

MEGAPACK_INSTANTIATE_STRATEGY(pack_bucket_naive, BucketNaiveRules);

}  // namespace megapack
