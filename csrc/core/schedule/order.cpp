#include "core/schedule/order.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/base/check.hpp"
#include "core/schedule/random.hpp"

namespace megapack {
std::vector<std::int32_t> order_cycle(Span<const std::int64_t> counts, Span<const double> odds,
                                      std::uint64_t key, bool spread) {
    check(counts.size() == odds.size(), counts.size(), " counts and ", odds.size(), " odds");
    constexpr std::int64_t kMostDraws = std::numeric_limits<std::int32_t>::max();
    std::int64_t num_draws = 0;
    std::vector<std::vector<double>> times(counts.size());  // of every bucket, ascending
    for (std::int64_t b = 0; b < counts.size(); ++b) {
        check(counts[b] >= 0 && counts[b] <= kMostDraws - num_draws, "bucket ", b, " is drawn ",
              counts[b], " times; a cycle has from 0 to ", kMostDraws, " draws in all");
        num_draws += counts[b];
        check(std::isfinite(odds[b]) && odds[b] > 0, "bucket ", b, " has odds ", odds[b],
              "; they must be positive");
        const std::uint64_t bucket_key = random_bits(key, b);
        const double rate = static_cast<double>(counts[b]) * odds[b];
        times[b].reserve(counts[b]);
        for (std::int64_t t = 0; t < counts[b]; ++t) {
            const double u = random_unit(bucket_key, static_cast<std::uint64_t>(t));
            times[b].push_back(spread ? (static_cast<double>(t) + u) / rate : u);
        }
        if (!spread) std::sort(times[b].begin(), times[b].end());
    }
    std::vector<std::int32_t> order;
    order.reserve(num_draws);
    std::vector<std::int64_t> turn(counts.size(), 0);
    for (std::int64_t i = 0; i < num_draws; ++i) {  // there are few buckets
        std::int64_t first = -1;
        for (std::int64_t b = 0; b < counts.size(); ++b) {
            if (turn[b] == counts[b]) continue;
            if (first < 0 || times[b][turn[b]] < times[first][turn[first]]) first = b;
        }
        order.push_back(static_cast<std::int32_t>(first));
        ++turn[first];
    }
    return order;
}

}  // namespace megapack
