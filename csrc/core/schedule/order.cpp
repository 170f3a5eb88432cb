#include "core/schedule/order.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/base/check.hpp"
#include "core/schedule/random.hpp"

namespace megapack {
namespace {

struct Draw {
    double time;
    std::int32_t bucket;

    bool operator<(const Draw& other) const {
        return time != other.time ? time < other.time : bucket < other.bucket;
    }
};

}  // namespace

std::vector<std::int32_t> order_cycle(Span<const std::int64_t> counts, Span<const double> odds,
                                      std::uint64_t key, bool spread) {
    check(counts.size() == odds.size(), counts.size(), " counts and ", odds.size(), " odds");
    constexpr std::int64_t kMostDraws = std::numeric_limits<std::int32_t>::max();
    std::int64_t left = kMostDraws;
    std::vector<Draw> draws;
    for (std::int64_t b = 0; b < counts.size(); ++b) {
        check(counts[b] >= 0 && counts[b] <= left, "bucket ", b, " is drawn ", counts[b],
              " times; a cycle has from 0 to ", kMostDraws, " draws in all");
        left -= counts[b];
        check(std::isfinite(odds[b]) && odds[b] > 0, "bucket ", b, " has odds ", odds[b],
              "; they must be positive");
        const std::uint64_t bucket_key = random_bits(key, b);
        const double rate = static_cast<double>(counts[b]) * odds[b];
        for (std::int64_t t = 0; t < counts[b]; ++t) {
            const double u = random_unit(bucket_key, static_cast<std::uint64_t>(t));
            const double time = spread ? (static_cast<double>(t) + u) / rate : u;
            draws.push_back({time, static_cast<std::int32_t>(b)});
        }
    }
    std::sort(draws.begin(), draws.end());
    std::vector<std::int32_t> order(draws.size());
    std::transform(draws.begin(), draws.end(), order.begin(), [](Draw d) { return d.bucket; });
    return order;
}

}  // namespace megapack
