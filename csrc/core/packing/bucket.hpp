// The drained bucket strategies: `bucket`, `bucket_v0`, `bucket_llm`.
#pragma once

#include <utility>

#include "core/base/random.hpp"
#include "core/packing/bucket_plan.hpp"
#include "core/packing/types.hpp"

namespace megapack {

// `pool="drain"`. Every document draws one of ceil(n / pool_size) pools (Purpose::kPools); the
// pools are drained one after the other, each in file order among documents of equal length.
// `given` patterns come first; they need a single pool.
template <typename Id, typename Length>
Samples<Id, Length> pack_buckets(const Lengths<Length>& lengths, const BucketRules& rules,
                                 const std::vector<GivenPattern>& given, std::int64_t pool_size,
                                 const Run& run);

// `pool="stream"`, Algorithm 1 to the letter: documents in shuffled order (Purpose::kDocuments)
// enter one pool; from the pool_size-th on each is followed by one sample, and what is left in the
// end is drained. A document longer than the largest bucket gives its first tokens when it is the
// longest.
template <typename Id, typename Length>
Samples<Id, Length> pack_bucket_stream(const Lengths<Length>& lengths, const BucketRules& rules,
                                       std::int64_t pool_size, const Run& run);

// Documents per pool, at least 1.
inline void check_pool_size(std::int64_t pool_size) {
    check(pool_size >= 1, "pool_size is ", pool_size, "; it must be at least 1");
}

// Puts the segments [begin, end) in seeded order: for k = size - 1 ... 1, segment k is swapped with
// segment chance.below(k, k + 1).
template <typename Id, typename Length>
void shuffle_segments(const Samples<Id, Length>& samples, std::int64_t begin, std::int64_t end,
                      Random chance) {
    for (std::int64_t k = end - begin; k-- > 1;) {
        const auto j =
            static_cast<std::size_t>(begin) +
            chance.below(static_cast<std::uint64_t>(k), static_cast<std::uint64_t>(k) + 1);
        const auto i = static_cast<std::size_t>(begin + k);
        std::swap(samples.segment_document[i], samples.segment_document[j]);
        std::swap(samples.segment_begin[i], samples.segment_begin[j]);
        std::swap(samples.segment_length[i], samples.segment_length[j]);
    }
}

}  // namespace megapack
