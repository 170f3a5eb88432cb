#include "core/packing/decompose.hpp"

namespace megapack {
namespace {

void check_powers_of_two(const std::vector<std::int64_t>& capacities) {
    check_capacities(capacities);
    check((capacities[0] & (capacities[0] - 1)) == 0, "bucket ", capacities[0],
          " is no power of two");
    for (std::int64_t b = 1; b < ssize(capacities); ++b)
        check(capacities[b] == 2 * capacities[b - 1], "bucket ", capacities[b], " follows ",
              capacities[b - 1],
              "; every power of two between the smallest and the largest is one");
}

// visit(bucket, number of pieces) for the digits of a length, largest first; the tokens dropped.
template <typename Visit>
std::int64_t for_each_digit(std::int64_t length, const std::vector<std::int64_t>& capacities,
                            Visit visit) {
    std::int64_t b = ssize(capacities) - 1;
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
Samples<Id, Length> pack_decompose(const Lengths<Length>& lengths, const DecomposeRules& rules,
                                   const Run& run) {
    const std::vector<std::int64_t>& capacities = rules.capacities;
    check_powers_of_two(capacities);
    const Documents<Id, Length> documents = in_file_order<Id>(lengths);
    const std::int64_t n = documents.size(), buckets = ssize(capacities);
    run.progress.add_total(2 * n);
    std::vector<std::vector<std::int64_t>> next(num_parts(n));
    std::vector<std::int64_t> dropped(num_parts(n), 0);
    for_each_part(run, n, [&](std::int64_t p, Part range) {
        next[p].assign(buckets, 0);
        for (std::int64_t i = range.begin; i < range.end; ++i)
            dropped[p] +=
                for_each_digit(documents[i].length, capacities,
                               [&](std::int64_t b, std::int64_t pieces) { next[p][b] += pieces; });
    });
    const std::vector<std::int64_t> begins = lay_out(next, buckets);
    std::vector<std::int64_t> counts;
    for (std::int64_t b = 0; b < buckets; ++b) counts.push_back(begins[b + 1] - begins[b]);
    Samples<Id, Length> out(capacities, counts, begins[buckets]);
    out.dropped_tokens = lay_out(dropped);
    for_each_part(run, n, [&](std::int64_t p, Part range) {
        for (std::int64_t i = range.begin; i < range.end; ++i) {
            const Item<Id, Length> item = documents[i];
            std::int64_t begin = 0;
            for_each_digit(item.length, capacities, [&](std::int64_t b, std::int64_t pieces) {
                for (; pieces > 0; --pieces, begin += capacities[b]) {
                    const std::int64_t at = next[p][b]++;
                    out.open_sample(at, at);
                    out.put(at, item.document, static_cast<Length>(begin),
                            static_cast<std::int32_t>(capacities[b]));
                }
            });
        }
    });
    return out;
}

MEGAPACK_INSTANTIATE_STRATEGY(pack_decompose, DecomposeRules);

}  // namespace megapack
