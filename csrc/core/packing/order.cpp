#include "core/packing/order.hpp"

#include <algorithm>
#include <utility>

namespace megapack {

template <typename Id, typename Length>
Dealt<Id, Length> deal(Span<const Length> lengths, std::int64_t num_groups, Random chance,
                       int threads) {
    const std::int64_t n = lengths.size();
    const auto group_of = [&](std::int64_t i) { return chance.below(i, num_groups); };
    // next[part][group]: first a count, then where the part's next document of the group goes.
    std::vector<std::vector<std::int64_t>> next(threads, std::vector<std::int64_t>(num_groups, 0));
    for_each_part(threads, n, threads, [&](std::int64_t p, Part range) {
        for (std::int64_t i = range.begin; i < range.end; ++i) ++next[p][group_of(i)];
    });
    Dealt<Id, Length> dealt{Buffer<Item<Id, Length>>(n), lay_out(next, num_groups)};
    for_each_part(threads, n, threads, [&](std::int64_t p, Part range) {
        for (std::int64_t i = range.begin; i < range.end; ++i)
            dealt.items[next[p][group_of(i)]++] = {static_cast<Id>(i), lengths[i]};
    });
    return dealt;
}

template <typename Id, typename Length>
Buffer<Item<Id, Length>> shuffle(Span<const Length> lengths, Random chance, int threads) {
    constexpr std::int64_t kGroupSize = std::int64_t{1} << 15, kMaxGroups = std::int64_t{1} << 12;
    const std::int64_t n = lengths.size();
    const std::int64_t groups =
        std::clamp((n + kGroupSize - 1) / kGroupSize, std::int64_t{1}, kMaxGroups);
    Dealt<Id, Length> dealt = deal<Id, Length>(lengths, groups, chance.child(0), threads);
    parallel_for(threads, groups, [&](std::int64_t g) {
        const Random random = chance.child(1).child(g);
        Item<Id, Length>* items = dealt.items.data() + dealt.offsets[g];
        for (std::int64_t k = dealt.offsets[g + 1] - dealt.offsets[g]; k-- > 1;)
            std::swap(items[k], items[random.below(k, k + 1)]);
    });
    return std::move(dealt.items);
}

#define MEGAPACK_INSTANTIATE(Id, Length)                                            \
    template Dealt<Id, Length> deal(Span<const Length>, std::int64_t, Random, int); \
    template Buffer<Item<Id, Length>> shuffle(Span<const Length>, Random, int);
MEGAPACK_FOR_EACH_WIDTH(MEGAPACK_INSTANTIATE)

}  // namespace megapack
