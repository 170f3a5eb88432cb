// The drained bucket strategies: `bucket`, `bucket_v0`, `bucket_llm`.
#pragma once

#include "core/packing_bucket_plan.hpp"
#include "core/packing_types.hpp"

namespace megapack {

// Every document draws one of ceil(n / pool_size) pools (Purpose::kPools); the pools are drained
// one after the other, each in file order among documents of equal length.
template <typename Id, typename Length>
Samples<Id, Length> pack_buckets(Span<const Length> lengths, const BucketRules& rules,
                                 std::int64_t pool_size, std::uint64_t seed, int threads,
                                 Progress& progress);

}  // namespace megapack
