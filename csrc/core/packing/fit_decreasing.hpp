// first_fit_decreasing, best_fit_decreasing: full chunks are samples of their own, the rests are
// fitted from long to short to bins of capacity + extra_capacity, and what lies past the capacity
// in a bin is dropped.
#pragma once

#include "core/packing/fit_plan.hpp"
#include "core/packing/strategy.hpp"

namespace megapack {

struct FitRules {
    std::int64_t capacity;
    std::int64_t extra_capacity = 0;
    Fit fit = Fit::kFirst;
};

template <typename Id, typename Length>
Samples<Id, Length> pack_fit_decreasing(const Lengths<Length>& lengths, const FitRules& rules,
                                        const Run& run);

}  // namespace megapack
