// Permutations, orders of buckets, blends and assignments: bijections for every size.
#include <algorithm>
#include <numeric>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "core/schedule/assign.hpp"
#include "core/schedule/blend.hpp"
#include "core/schedule/cycle_order.hpp"
#include "core/schedule/permute.hpp"
#include "core/schedule/random.hpp"
#include "require.hpp"

using namespace megapack;

namespace {

bool is_permutation_of_range(std::vector<std::int64_t> values) {
    std::sort(values.begin(), values.end());
    for (std::size_t i = 0; i < values.size(); ++i)
        if (values[i] != static_cast<std::int64_t>(i)) return false;
    return true;
}

void test_permutations() {
    for (const std::int64_t size : {1, 2, 3, 1023, 1024, 1025, 4096, 4097, 100000}) {
        std::vector<std::int64_t> out(size);
        permute_range(static_cast<std::uint64_t>(size), size, 0, out);
        require(is_permutation_of_range(out), "a permutation repeats a position");
        std::vector<std::int64_t> positions(out.size());
        permute_inverse(static_cast<std::uint64_t>(size), size, out, positions);
        for (std::int64_t i = 0; i < size; ++i)
            require(positions[i] == i, "the inverse is not the position of the value");
        std::vector<std::int64_t> none;
        permute_range(1, size, size, none);
    }
    std::vector<std::int64_t> one(1);
    const std::int64_t huge = (std::int64_t{1} << 62) + 1;
    permute_range(5, huge, huge - 1, one);
    require(one[0] >= 0 && one[0] < huge, "a position outside of the range");
    permute_inverse(5, huge, one, one);
    require(one[0] == huge - 1, "an inverse of a huge permutation");
    std::vector<std::int64_t> both(2);
    for (const std::int64_t out : {-1, 10}) {
        const std::vector<std::int64_t> values{3, out};
        require(refuses([&] { permute_inverse(1, 10, values, both); }), "a value outside");
        require(refuses([&] { permute_range(1, 10, out, one); }), "a range outside");
    }
}

// Returns the buckets of a cycle by sorting all draws by their times.
std::vector<std::int32_t> sorted_draws(const std::vector<std::int64_t>& counts,
                                       const std::vector<double>& odds, CycleOrder::Times times) {
    std::vector<std::pair<double, std::int32_t>> draws;
    for (std::size_t b = 0; b < counts.size(); ++b) {
        const std::uint64_t key = random_bits(9, b);
        for (std::int64_t t = 0; t < counts[b]; ++t) {
            const double u = random_unit(key, static_cast<std::uint64_t>(t));
            const double rate = static_cast<double>(counts[b]) * odds[b];
            double time = (static_cast<double>(t) + u) / rate;
            if (times == CycleOrder::Times::kRandom) time = u;
            if (times == CycleOrder::Times::kConsecutive) time = static_cast<double>(b);
            draws.emplace_back(time, static_cast<std::int32_t>(b));
        }
    }
    std::sort(draws.begin(), draws.end());
    std::vector<std::int32_t> order;
    for (const auto& draw : draws) order.push_back(draw.second);
    return order;
}

void test_orders() {
    using Times = CycleOrder::Times;
    const std::vector<std::int64_t> one{9};
    for (const std::vector<double>& odds : std::vector<std::vector<double>>{{0}, {1e-300}, {1e300}})
        require(refuses([&] { CycleOrder(one, odds, 1, Times::kSpread, false); }),
                "odds that give draws equal times were accepted");
    for (const std::vector<std::int64_t>& counts : std::vector<std::vector<std::int64_t>>{
             {0, 300, 1, 31}, {1, 0, 0, 0}, {40, 1, 500, 7}, {0, 0, 0, 0}}) {
        for (const std::vector<double>& odds : std::vector<std::vector<double>>{
                 {1.0, 1e12, 100.0, 1e-6}, {1.0, 1.0, 1.0, 1.0}, {1e30, 1e20, 1e10, 1.0}}) {
            for (const Times times : {Times::kSpread, Times::kRandom, Times::kConsecutive}) {
                for (const bool largest_first : {false, true}) {
                    std::vector<std::int32_t> expected = sorted_draws(counts, odds, times);
                    if (largest_first && !expected.empty()) {
                        std::swap(expected.front(),
                                  *std::max_element(expected.begin(), expected.end()));
                    }
                    const CycleOrder order(counts, odds, 9, times, largest_first);
                    const auto size = static_cast<std::int64_t>(expected.size());
                    require(order.size() == size, "a cycle has another number of draws");
                    require(order.range(0, size) == expected, "draws are not in order of time");
                    std::vector<std::int64_t> before(counts.size(), 0);
                    for (std::int64_t at = 0; at < size; ++at) {
                        const std::int32_t bucket = expected[at];
                        auto& rank = before[bucket];
                        require(order.counts(at) == before, "counts differ from the draws before");
                        const CycleOrder::Draw draw = order.at(at);
                        require(draw.bucket == bucket && draw.rank == rank,
                                "a single draw differs from the whole order");
                        require(order.position(bucket, rank) == at, "the inverse is wrong");
                        ++rank;
                    }
                    require(order.counts(size) == counts, "a draw is missing");
                }
            }
        }
    }
}

// Every position exists once, also near the limit. tests/data/test_blend.py checks the sources.
void test_blends() {
    const std::int64_t far = (std::int64_t{1} << 53) - 5000;
    const std::int64_t half = std::int64_t{1} << 61;
    for (const std::vector<std::int64_t>& weights : std::vector<std::vector<std::int64_t>>{
             {7}, {0, 2, 2, 5}, {half, half}, {1, 1, 2, 3, 5, 8, 13, 21, 34}, {1, half, 3, 0}}) {
        const Blend blend(weights);
        for (const std::int64_t begin : {std::int64_t{0}, far}) {
            const Blend::Range range = blend.range(begin, begin + 5000);
            require(is_permutation_of_range({range.places.begin(), range.places.end()}),
                    "a place of a blend is missing");
            const auto end = blend.taken(begin + 5000);
            for (std::size_t i = 0; i < weights.size(); ++i)
                require(blend.taken_of(static_cast<std::int32_t>(i), begin + 5000) == end[i],
                        "taken_of differs from taken");
        }
        require(blend.range(far, far).runs.empty(), "an empty range has runs");
    }
    for (const std::vector<std::int64_t>& weights :
         std::vector<std::vector<std::int64_t>>{{}, {0, 0}, {-1, 2}, {half, half, 1}}) {
        require(refuses([&] { Blend{weights}; }), "invalid weights were accepted");
    }
}

void test_assignments() {
    std::mt19937 random(3);
    for (int round = 0; round < 300; ++round) {
        std::vector<std::int64_t> sizes(1 + random() % 12);
        for (auto& size : sizes) size = static_cast<std::int64_t>(random() % 5);
        const auto total = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
        std::vector<std::int64_t> costs(total);
        for (auto& cost : costs) cost = static_cast<std::int64_t>(random() % 1000);
        require(is_permutation_of_range(assign_evenly(costs, sizes)), "an item was assigned twice");
    }
    const std::vector<std::int64_t> costs{1, 2}, room{1};
    require(refuses([&] { assign_evenly(costs, room); }), "more items than room were accepted");
}

}  // namespace

int main() {
    return pass({test_permutations, test_orders, test_blends, test_assignments});
}
