#include "core/packing/decompose.hpp"

#include <numeric>
#include <utility>

namespace megapack {
namespace {

void check_powers_of_two(const std::vector<std::int64_t>& capacities) {
    check_capacities(capacities);
    check((capacities[0] & (capacities[0] - 1)) == 0, "bucket ", capacities[0],
          " is no power of two");
    for (std::size_t b = 1; b < capacities.size(); ++b)
        check(capacities[b] == 2 * capacities[b - 1], "bucket ", capacities[b], " follows ",
              capacities[b - 1],
              "; every power of two between the smallest and the largest is one");
}

// visit(bucket, number of pieces) for the digits of a length, largest first; the tokens dropped.
template <typename Visit>
std::int64_t for_each_digit(std::int64_t length, const std::vector<std::int64_t>& capacities,
                            Visit visit) {
    std::size_t b = capacities.size() - 1;
    const std::int64_t repeats = length / capacities[b];
    if (repeats > 0) visit(b, repeats);
    length %= capacities[b];
    while (length >= capacities[0]) {
        --b;
        if (length < capacities[b]) continue;
        visit(b, std::int64_t{1});
        length -= capacities[b];
    }
    return length;
}

}  // namespace

template <typename Id, typename Length>
Samples<Id, Length> pack_decompose(const Documents<Id, Length>& documents,
                                   const std::vector<std::int64_t>& capacities, const Run& run) {
    check_powers_of_two(capacities);
    const std::size_t n = documents.size(), buckets = capacities.size();
    const std::size_t parts = (n + kPartSize - 1) / kPartSize;
    run.progress.add_total(2 * static_cast<std::int64_t>(n));
    std::vector<std::vector<std::int64_t>> next(parts, std::vector<std::int64_t>(buckets, 0));
    std::vector<std::int64_t> dropped(parts, 0);
    parallel_for(run.threads, parts, [&](std::size_t p) {
        const Part range = part_of(n, parts, p);
        for (std::size_t i = range.begin; i < range.end; ++i)
            dropped[p] +=
                for_each_digit(documents[i].length, capacities,
                               [&](std::size_t b, std::int64_t pieces) { next[p][b] += pieces; });
        run.progress.advance(static_cast<std::int64_t>(range.end - range.begin));
    });
    std::vector<std::int64_t> counts(buckets, 0);
    std::int64_t position = 0;
    for (std::size_t b = 0; b < buckets; ++b) {
        const std::int64_t first = position;
        for (std::size_t p = 0; p < parts; ++p) position += std::exchange(next[p][b], position);
        counts[b] = position - first;
    }
    Samples<Id, Length> out(capacities, counts, position);
    out.dropped_tokens = std::accumulate(dropped.begin(), dropped.end(), std::int64_t{0});
    parallel_for(run.threads, parts, [&](std::size_t p) {
        const Part range = part_of(n, parts, p);
        for (std::size_t i = range.begin; i < range.end; ++i) {
            const Item<Id, Length> item = documents[i];
            std::int64_t begin = 0;
            for_each_digit(item.length, capacities, [&](std::size_t b, std::int64_t pieces) {
                for (; pieces > 0; --pieces, begin += capacities[b]) {
                    const std::int64_t at = next[p][b]++;
                    out.open_sample(at, at);
                    out.put(at, item.document, static_cast<Length>(begin),
                            static_cast<std::int32_t>(capacities[b]));
                }
            });
        }
        run.progress.advance(static_cast<std::int64_t>(range.end - range.begin));
    });
    return out;
}

#define MEGAPACK_INSTANTIATE(Id, Length)                                      \
    template Samples<Id, Length> pack_decompose(const Documents<Id, Length>&, \
                                                const std::vector<std::int64_t>&, const Run&);
MEGAPACK_FOR_EACH_WIDTH(MEGAPACK_INSTANTIATE)

}  // namespace megapack
