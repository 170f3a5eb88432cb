// Assignment of the samples of a step to ranks and micro batches with equal work.
//
//     assign_evenly(costs {5, 1, 4, 2}, bin_sizes {2, 2})  ->  {0, 1, 2, 3}: bins of cost 6 and 6
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/span.hpp"

namespace megapack {

// Assigns items of costs[i] >= 0 to bins of given sizes so that the largest total is small:
// costliest first to the least loaded bin with room (LPT), then exchanges between the fullest bin
// and others while they help. Returns the items bin by bin, each bin in order of falling cost.
// Deterministic: ties go to the smaller item, then to the smaller bin. Throws std::invalid_argument
// unless the sizes sum to the number of items.
std::vector<std::int64_t> assign_evenly(Span<const std::int64_t> costs,
                                        Span<const std::int64_t> bin_sizes);

}  // namespace megapack
