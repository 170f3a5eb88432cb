// Which dataset each sample of a blended bucket comes from.
#pragma once

#include <cstdint>
#include <vector>

#include "core/span.hpp"

namespace megapack {

// Position i takes the dataset whose share lags most: argmax over d of
// shares[d] / total * max(i, 1) - (how often d was taken before), the smaller d among equals, which
// is how Megatron blends. Shares are whole numbers, so after `total` = sum of the shares every
// dataset has been taken exactly shares[d] times and the pattern may be repeated for ever.
struct BlendPattern {
    std::vector<std::int32_t> dataset;  // (total,)
    std::vector<std::int32_t> rank;     // (total,) how often the same dataset was taken before
};

BlendPattern blend_pattern(Span<const std::int64_t> shares);

}  // namespace megapack
