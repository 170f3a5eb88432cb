// Equal work: samples of one step dealt to ranks and micro batches.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/span.hpp"

namespace megapack {

// Deals item i (costs[i] >= 0) to bins of prescribed sizes so that the largest total is small:
// longest first to the least loaded bin that has room (LPT), then exchanges between the fullest bin
// and others while they help. Returns the items bin by bin, each bin in order of falling cost.
// Throws std::invalid_argument unless the sizes sum to the number of items.
// Deterministic: ties go to the smaller item, then to the smaller bin.
std::vector<std::int64_t> assign_evenly(Span<const std::int64_t> costs,
                                        Span<const std::int64_t> bin_sizes);

}  // namespace megapack
