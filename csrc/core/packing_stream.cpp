#include "core/packing_stream.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace megapack {
namespace {

// Documents a task handles between two reports of progress.
constexpr std::size_t kPartSize = std::size_t{1} << 20;

// [part][bucket] -> a number; prefix sums run over the parts, bucket by bucket.
using Table = std::vector<std::vector<std::int64_t>>;

std::vector<std::int64_t> exclusive_prefix(Table& table, std::size_t columns) {
    std::vector<std::int64_t> total(columns, 0);
    for (auto& row : table)
        for (std::size_t b = 0; b < columns; ++b) total[b] += std::exchange(row[b], total[b]);
    return total;
}

std::size_t smallest_that_holds(const std::vector<std::int64_t>& capacities, std::int64_t length) {
    std::size_t b = 0;  // no branch to mispredict: there are few buckets
    for (std::size_t i = 0; i + 1 < capacities.size(); ++i) b += capacities[i] < length ? 1 : 0;
    return b;
}

// visit(bucket, item) for every document of a part.
template <typename Id, typename Length, typename Visit>
void for_each_document(const Documents<Id, Length>& documents,
                       const std::vector<std::int64_t>& capacities, Part range, Visit visit) {
    for (std::size_t i = range.begin; i < range.end; ++i) {
        const Item<Id, Length> item = documents[i];
        visit(smallest_that_holds(capacities, item.length), item);
    }
}

// One bucket on one thread needs no counting: every cut splits at most one document.
template <typename Id, typename Length>
Samples<Id, Length> pack_one_stream(const Documents<Id, Length>& documents, std::int64_t capacity,
                                    Progress& progress) {
    const std::size_t n = documents.size(), parts = (n + kPartSize - 1) / kPartSize;
    progress.add_total(static_cast<std::int64_t>(n));
    std::int64_t tokens = 0;
    for (const Length length : documents.lengths) tokens += length;
    const std::int64_t samples = (tokens + capacity - 1) / capacity;
    Samples<Id, Length> out({capacity}, {samples}, static_cast<std::int64_t>(n) + samples);
    out.open_sample(0, 0);
    StreamCutter<Id, Length> cutter(out, capacity, 0, 0, 0);
    for (std::size_t p = 0; p < parts; ++p) {
        const Part range = part_of(n, parts, p);
        StreamCutter<Id, Length> own = cutter;  // in registers
        for (std::size_t i = range.begin; i < range.end; ++i) {
            const Item<Id, Length> item = documents[i];
            own.push(item.document, 0, item.length);
        }
        cutter = own;
        progress.advance(static_cast<std::int64_t>(range.end - range.begin));
    }
    out.truncate(samples, cutter.num_segments());
    return out;
}

}  // namespace

template <typename Id, typename Length>
Samples<Id, Length> pack_streams(const Documents<Id, Length>& documents,
                                 const std::vector<std::int64_t>& capacities, int threads,
                                 Progress& progress) {
    if (capacities.size() == 1 && threads == 1)
        return pack_one_stream(documents, capacities[0], progress);
    const std::size_t n = documents.size(), buckets = capacities.size();
    const std::size_t parts = (n + kPartSize - 1) / kPartSize;
    progress.add_total(3 * static_cast<std::int64_t>(n));

    // Where each part begins: its token position in every stream, then its first segment there.
    Table position(parts, std::vector<std::int64_t>(buckets, 0)), segment = position;
    parallel_for(threads, parts, [&](std::size_t p) {
        const Part range = part_of(n, parts, p);
        for_each_document(documents, capacities, range,
                          [&](std::size_t b, auto item) { position[p][b] += item.length; });
        progress.advance(static_cast<std::int64_t>(range.end - range.begin));
    });
    const std::vector<std::int64_t> tokens = exclusive_prefix(position, buckets);
    parallel_for(threads, parts, [&](std::size_t p) {
        const Part range = part_of(n, parts, p);
        std::vector<SegmentCounter> counters;
        for (std::size_t b = 0; b < buckets; ++b)
            counters.emplace_back(capacities[b], position[p][b]);
        for_each_document(documents, capacities, range,
                          [&](std::size_t b, auto item) { counters[b].push(item.length); });
        for (std::size_t b = 0; b < buckets; ++b) segment[p][b] = counters[b].num_segments();
        progress.advance(static_cast<std::int64_t>(range.end - range.begin));
    });
    const std::vector<std::int64_t> segments = exclusive_prefix(segment, buckets);

    std::vector<std::int64_t> counts(buckets), segment_base(buckets, 0);
    for (std::size_t b = 0; b < buckets; ++b) {
        counts[b] = (tokens[b] + capacities[b] - 1) / capacities[b];
        if (b > 0) segment_base[b] = segment_base[b - 1] + segments[b - 1];
    }
    const std::int64_t num_segments = std::accumulate(segments.begin(), segments.end(), 0ll);
    Samples<Id, Length> out(capacities, counts, num_segments);
    for (std::size_t b = 0; b < buckets; ++b)
        out.open_sample(out.bucket_sample_offsets[b], segment_base[b]);
    parallel_for(threads, parts, [&](std::size_t p) {
        const Part range = part_of(n, parts, p);
        std::vector<StreamCutter<Id, Length>> cutters;
        for (std::size_t b = 0; b < buckets; ++b)
            cutters.emplace_back(out, capacities[b], out.bucket_sample_offsets[b],
                                 segment_base[b] + segment[p][b], position[p][b]);
        for_each_document(documents, capacities, range, [&](std::size_t b, auto item) {
            cutters[b].push(item.document, 0, item.length);
        });
        progress.advance(static_cast<std::int64_t>(range.end - range.begin));
    });
    return out;
}

template <typename Id, typename Length>
void drop_partial_sample(Samples<Id, Length>& samples) {
    const std::int64_t last = samples.num_samples() - 1;
    if (last < 0) return;
    const std::int64_t first = samples.sample_segment_offsets[static_cast<std::size_t>(last)];
    std::int64_t tokens = 0;
    for (auto s = static_cast<std::size_t>(first); s < samples.segment_length.size(); ++s)
        tokens += samples.segment_length[s];
    if (tokens == samples.bucket_capacity.back()) return;
    samples.dropped_tokens += tokens;
    samples.truncate(last, first);
}

#define MEGAPACK_INSTANTIATE(Id, Length)                                                         \
    template Samples<Id, Length> pack_streams(const Documents<Id, Length>&,                      \
                                              const std::vector<std::int64_t>&, int, Progress&); \
    template void drop_partial_sample(Samples<Id, Length>&);
MEGAPACK_FOR_EACH_WIDTH(MEGAPACK_INSTANTIATE)

}  // namespace megapack
