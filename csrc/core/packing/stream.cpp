#include "core/packing/stream.hpp"

#include <type_traits>

namespace megapack {
namespace {

std::int64_t smallest_that_holds(const std::vector<std::int64_t>& capacities, std::int64_t length) {
    std::int64_t b = 0;  // no branch to mispredict: there are few buckets
    for (std::int64_t i = 0; i + 1 < ssize(capacities); ++i) b += capacities[i] < length ? 1 : 0;
    return b;
}

// visit(bucket, item) for every document of a part.
template <typename Id, typename Length, typename Visit>
void for_each_document(const Documents<Id, Length>& documents,
                       const std::vector<std::int64_t>& capacities, Part range, Visit visit) {
    for (std::int64_t i = range.begin; i < range.end; ++i) {
        const Item<Id, Length> item = documents[i];
        visit(smallest_that_holds(capacities, item.length), item);
    }
}

// One bucket. On one thread nothing needs to be counted beforehand: every cut splits at most one
// document, and a part begins where the part before has ended.
template <typename Id, typename Length>
Samples<Id, Length> pack_one_stream(const Documents<Id, Length>& documents, std::int64_t capacity,
                                    const Run& run) {
    const std::int64_t n = documents.size(), parts = num_parts(n);
    const bool in_turn = run.threads == 1;
    run.progress.add_total((in_turn ? 2 : 3) * n);
    std::vector<std::int64_t> position(parts + 1, 0), segment(parts + 1, 0);
    for_each_part(run, n, [&](std::int64_t p, Part range) {
        const Documents<Id, Length> items = documents;
        std::uint64_t tokens = 0;  // lengths are not negative: unsigned numbers widen faster
        for (std::int64_t i = range.begin; i < range.end; ++i)
            tokens += std::make_unsigned_t<Length>(items[i].length);
        position[p] = static_cast<std::int64_t>(tokens);
    });
    lay_out(position);
    const std::int64_t samples = (position[parts] + capacity - 1) / capacity;
    Samples<Id, Length> out({capacity}, {samples}, n + samples);
    out.open_sample(0, 0);
    if (!in_turn) {
        for_each_part(run, n, [&](std::int64_t p, Part range) {
            const Documents<Id, Length> items = documents;
            SegmentCounter counter(capacity, position[p]);
            for (std::int64_t i = range.begin; i < range.end; ++i) counter.push(items[i].length);
            segment[p] = counter.num_segments();
        });
        lay_out(segment);
    }
    for_each_part(run, n, [&](std::int64_t p, Part range) {
        StreamCutter<Id, Length> cutter(out, capacity, 0, segment[p], position[p]);
        cutter.push_range(documents, range, position[p + 1]);
        if (in_turn) segment[p + 1] = cutter.num_segments();
    });
    out.truncate(samples, segment[parts]);
    return out;
}

template <typename Id, typename Length>
Samples<Id, Length> pack_many_streams(const Documents<Id, Length>& documents,
                                      const std::vector<std::int64_t>& capacities, const Run& run) {
    const std::int64_t n = documents.size(), buckets = ssize(capacities);
    run.progress.add_total(3 * n);
    // Where each part begins: its token position in every stream, then its first segment there.
    std::vector<std::vector<std::int64_t>> position(num_parts(n)), segment(num_parts(n));
    for_each_part(run, n, [&](std::int64_t p, Part range) {
        position[p].assign(buckets, 0);
        for_each_document(documents, capacities, range,
                          [&](std::int64_t b, auto item) { position[p][b] += item.length; });
    });
    const std::vector<std::int64_t> token_begin = lay_out(position, buckets);
    for_each_part(run, n, [&](std::int64_t p, Part range) {
        std::vector<SegmentCounter> counters;
        for (std::int64_t b = 0; b < buckets; ++b)
            counters.emplace_back(capacities[b], position[p][b] -= token_begin[b]);
        for_each_document(documents, capacities, range,
                          [&](std::int64_t b, auto item) { counters[b].push(item.length); });
        for (const SegmentCounter& counter : counters) segment[p].push_back(counter.num_segments());
    });
    const std::vector<std::int64_t> segment_begin = lay_out(segment, buckets);

    std::vector<std::int64_t> counts;
    for (std::int64_t b = 0; b < buckets; ++b)
        counts.push_back((token_begin[b + 1] - token_begin[b] + capacities[b] - 1) / capacities[b]);
    Samples<Id, Length> out(capacities, counts, segment_begin[buckets]);
    for (std::int64_t b = 0; b < buckets; ++b)
        out.open_sample(out.bucket_sample_offsets[b], segment_begin[b]);
    for_each_part(run, n, [&](std::int64_t p, Part range) {
        std::vector<StreamCutter<Id, Length>> cutters;
        for (std::int64_t b = 0; b < buckets; ++b)
            cutters.emplace_back(out, capacities[b], out.bucket_sample_offsets[b], segment[p][b],
                                 position[p][b]);
        for_each_document(documents, capacities, range, [&](std::int64_t b, auto item) {
            cutters[b].push(item.document, 0, item.length);
        });
    });
    return out;
}

}  // namespace

template <typename Id, typename Length>
Samples<Id, Length> pack_streams(const Documents<Id, Length>& documents,
                                 const std::vector<std::int64_t>& capacities, const Run& run) {
    if (capacities.size() == 1) return pack_one_stream(documents, capacities[0], run);
    return pack_many_streams(documents, capacities, run);
}

#define MEGAPACK_INSTANTIATE(Id, Length)                                    \
    template Samples<Id, Length> pack_streams(const Documents<Id, Length>&, \
                                              const std::vector<std::int64_t>&, const Run&);
MEGAPACK_FOR_EACH_WIDTH(MEGAPACK_INSTANTIATE)

}  // namespace megapack
