// The drained bucket strategies: `bucket`, `bucket_v0`, `bucket_llm`.
#pragma once

#include "core/packing/bucket_plan.hpp"
#include "core/packing/strategy.hpp"

namespace megapack {

// `pool="drain"`. Every document draws one of ceil(n / pool_size) pools (Purpose::kPools); the
// pools are drained one after the other, each in file order among documents of equal length.
// Given patterns need a single pool.
template <typename Id, typename Length>
Samples<Id, Length> pack_bucket(const Lengths<Length>& lengths, const BucketRules& rules,
                                const Run& run);

}  // namespace megapack
