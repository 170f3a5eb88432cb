// The order of buckets inside one cycle of the schedule.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/span.hpp"

namespace megapack {

// Bucket b is drawn counts[b] times; its t-th draw happens at time (t + u) / (counts[b] * odds[b])
// with u uniform in [0, 1) of its own, and the cycle is all draws in order of time (ties: smaller
// bucket). With equal odds every bucket is spread evenly over the whole cycle, so that any window
// holds the buckets in proportion; with odds o a bucket is exhausted after a share 1/o of the time
// of one with odds 1, which is sampling with odds o without replacement (Dataset Decomposition,
// arXiv 2405.13226, section 2.3) with the variance of independent draws removed.
// spread = false draws the whole cycle in random order instead.
std::vector<std::int32_t> order_cycle(Span<const std::int64_t> counts, Span<const double> odds,
                                      std::uint64_t key, bool spread);

}  // namespace megapack
