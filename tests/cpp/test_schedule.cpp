// Permutations, orders, blends and deals: bijections of the right size for every size.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>

#include "core/balance_deal.hpp"
#include "core/schedule_blend.hpp"
#include "core/schedule_order.hpp"
#include "core/schedule_permute.hpp"

using namespace megapack;

namespace {

void require(bool ok, const char* what) {
    if (ok) return;
    std::puts(what);
    std::exit(1);
}

bool is_permutation_of_range(std::vector<std::int64_t> values) {
    std::sort(values.begin(), values.end());
    for (std::size_t i = 0; i < values.size(); ++i) {
        if (values[i] != static_cast<std::int64_t>(i)) return false;
    }
    return true;
}

void test_permutations() {
    for (const std::int64_t size : {1, 2, 3, 1023, 1024, 1025, 4096, 4097, 100000}) {
        std::vector<std::int64_t> out(static_cast<std::size_t>(size));
        permute_range(static_cast<std::uint64_t>(size), size, 0, out);
        require(is_permutation_of_range(out), "a permutation repeats a position");
        std::vector<std::int64_t> none;
        permute_range(1, size, size, none);
    }
    std::vector<std::int64_t> one(1);
    const std::int64_t huge = (std::int64_t{1} << 62) + 1;
    permute_range(5, huge, huge - 1, one);
    require(one[0] >= 0 && one[0] < huge, "a position outside of the range");
    for (const std::int64_t first : {-1, 10}) {
        try {
            permute_range(1, 10, first, one);
            require(false, "a range outside of the permutation was accepted");
        } catch (const std::invalid_argument&) {
        }
    }
}

void test_orders_and_blends() {
    const std::vector<std::int64_t> counts{0, 700, 1, 31};
    const std::vector<double> odds{1.0, 1e12, 100.0, 1e-6};
    for (const bool spread : {true, false}) {
        const std::vector<std::int32_t> order = order_cycle(counts, odds, 9, spread);
        for (std::size_t b = 0; b < counts.size(); ++b) {
            require(std::count(order.begin(), order.end(), b) == counts[b], "a draw is missing");
        }
    }
    const BlendPattern pattern = blend_pattern(std::vector<std::int64_t>{0, 2, 2, 5});
    require(pattern.dataset.size() == 9 && pattern.rank.size() == 9, "a blend of another size");
    require(std::count(pattern.dataset.begin(), pattern.dataset.end(), 0) == 0,
            "share 0 was taken");
}

void test_deals() {
    std::mt19937 random(3);
    for (int round = 0; round < 300; ++round) {
        std::vector<std::int64_t> sizes(1 + random() % 12);
        for (auto& size : sizes) size = static_cast<std::int64_t>(random() % 5);
        const auto total = std::accumulate(sizes.begin(), sizes.end(), std::int64_t{0});
        std::vector<std::int64_t> costs(static_cast<std::size_t>(total));
        for (auto& cost : costs) cost = static_cast<std::int64_t>(random() % 1000);
        require(is_permutation_of_range(deal_evenly(costs, sizes)), "an item was dealt twice");
    }
    try {
        deal_evenly(std::vector<std::int64_t>{1, 2}, std::vector<std::int64_t>{1});
        require(false, "more items than room were accepted");
    } catch (const std::invalid_argument&) {
    }
}

}  // namespace

int main() {
    test_permutations();
    test_orders_and_blends();
    test_deals();
    std::puts("ok");
    return 0;
}
