// `bucket_v0` and `bucket_llm` with `pool="stream"`: BucketLLM's Algorithm 1 to the letter.
#pragma once

#include "core/packing/bucket_plan.hpp"
#include "core/packing/strategy.hpp"

namespace megapack {

// Documents in shuffled order (Purpose::kDocuments) enter one pool; from the pool_size-th on each
// is followed by one sample, and what is left in the end is drained. A document longer than the
// largest bucket gives its first tokens when it is the longest.
template <typename Id, typename Length>
Samples<Id, Length> pack_bucket_stream(const Lengths<Length>& lengths, const BucketRules& rules,
                                       const Run& run);

}  // namespace megapack
