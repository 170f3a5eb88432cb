#include "core/schedule_blend.hpp"

#include <algorithm>
#include <limits>

#include "core/check.hpp"

namespace megapack {

BlendPattern blend_pattern(Span<const std::int64_t> shares) {
    constexpr std::int64_t kLimit = std::numeric_limits<std::int32_t>::max();
    std::int64_t total = 0;
    for (const std::int64_t share : shares) {
        check(share >= 0 && share <= kLimit - total, "share ", share,
              " of a blend; shares are not negative and sum to less than 2^31");
        total += share;
    }
    BlendPattern pattern;
    pattern.dataset.reserve(static_cast<std::size_t>(total));
    pattern.rank.reserve(static_cast<std::size_t>(total));
    std::vector<std::int64_t> taken(shares.size(), 0);
    for (std::int64_t i = 0; i < total; ++i) {
        const std::int64_t target = std::max<std::int64_t>(i, 1);
        std::size_t best = 0;
        std::int64_t most = std::numeric_limits<std::int64_t>::min();
        for (std::size_t d = 0; d < shares.size(); ++d) {
            if (shares[d] == 0) continue;
            const std::int64_t lag = shares[d] * target - total * taken[d];
            if (lag > most) {
                most = lag;
                best = d;
            }
        }
        pattern.dataset.push_back(static_cast<std::int32_t>(best));
        pattern.rank.push_back(static_cast<std::int32_t>(taken[best]++));
    }
    return pattern;
}

}  // namespace megapack
