#include "core/packing/order.hpp"

#include <algorithm>
#include <utility>

namespace megapack {

template <typename Id, typename Length>
Dealt<Id, Length> deal(Span<const Length> lengths, std::size_t num_groups, Random chance,
                       int threads) {
    const std::size_t n = lengths.size();
    const auto parts = static_cast<std::size_t>(std::max(threads, 1));
    const auto group_of = [&](std::size_t i) {
        return static_cast<std::size_t>(chance.below(i, num_groups));
    };
    // next[part][group]: first a count, then where the part's next document of the group goes.
    std::vector<std::vector<std::size_t>> next(parts, std::vector<std::size_t>(num_groups, 0));
    parallel_for(threads, parts, [&](std::size_t p) {
        const Part range = part_of(n, parts, p);
        for (std::size_t i = range.begin; i < range.end; ++i) ++next[p][group_of(i)];
    });
    Dealt<Id, Length> dealt;
    std::size_t position = 0;
    for (std::size_t g = 0; g < num_groups; ++g) {
        dealt.offsets.push_back(position);
        for (std::size_t p = 0; p < parts; ++p) position += std::exchange(next[p][g], position);
    }
    dealt.offsets.push_back(position);
    dealt.items = Buffer<Item<Id, Length>>(n);
    parallel_for(threads, parts, [&](std::size_t p) {
        const Part range = part_of(n, parts, p);
        for (std::size_t i = range.begin; i < range.end; ++i)
            dealt.items[next[p][group_of(i)]++] = {static_cast<Id>(i), lengths[i]};
    });
    return dealt;
}

template <typename Id, typename Length>
Buffer<Item<Id, Length>> shuffle(Span<const Length> lengths, Random chance, int threads) {
    constexpr std::size_t kGroupSize = std::size_t{1} << 15, kMaxGroups = std::size_t{1} << 12;
    const std::size_t n = lengths.size();
    const std::size_t groups =
        std::clamp((n + kGroupSize - 1) / kGroupSize, std::size_t{1}, kMaxGroups);
    Dealt<Id, Length> dealt = deal<Id, Length>(lengths, groups, chance.child(0), threads);
    parallel_for(threads, groups, [&](std::size_t g) {
        const Random random = chance.child(1).child(g);
        Item<Id, Length>* items = dealt.items.data() + dealt.offsets[g];
        for (std::size_t k = dealt.offsets[g + 1] - dealt.offsets[g]; k-- > 1;)
            std::swap(items[k], items[random.below(k, k + 1)]);
    });
    return std::move(dealt.items);
}

#define MEGAPACK_INSTANTIATE(Id, Length)                                           \
    template Dealt<Id, Length> deal(Span<const Length>, std::size_t, Random, int); \
    template Buffer<Item<Id, Length>> shuffle(Span<const Length>, Random, int);
MEGAPACK_FOR_EACH_WIDTH(MEGAPACK_INSTANTIATE)

}  // namespace megapack
