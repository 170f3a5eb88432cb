// bucket_naive (BucketLLM's "Naive Bucketing"): documents go to the smallest bucket that holds
// them, or to the largest; in a bucket, concat.
#pragma once

#include <vector>

#include "core/packing/strategy.hpp"

namespace megapack {

struct BucketNaiveRules {
    std::vector<std::int64_t> capacities;  // ascending
    bool shuffle = false;                  // documents in seeded order (Purpose::kDocuments)
};

template <typename Id, typename Length>
Samples<Id, Length> pack_bucket_naive(const Lengths<Length>& lengths, const BucketNaiveRules& rules,
                                      const Run& run);

}  // namespace megapack
