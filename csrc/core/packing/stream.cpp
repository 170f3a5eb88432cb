#include "core/packing/stream.hpp"

#include <algorithm>
#include <numeric>
#include <type_traits>
#include <utility>

namespace megapack {
namespace {

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

// One bucket. On one thread nothing needs to be counted beforehand: every cut splits at most one
// document, and a part begins where the part before has ended.
template <typename Id, typename Length>
class OneStream {
  public:
    OneStream(const Documents<Id, Length>& documents, std::int64_t capacity)
        : documents_(documents),
          capacity_(capacity),
          parts_((documents.size() + kPartSize - 1) / kPartSize),
          position_(parts_ + 1, 0),
          segment_(parts_ + 1, 0) {}

    Samples<Id, Length> pack(const Run& run) {
        const int threads = run.threads;
        find_positions(run);
        const std::int64_t samples = (position_[parts_] + capacity_ - 1) / capacity_;
        const auto n = static_cast<std::int64_t>(documents_.size());
        Samples<Id, Length> out({capacity_}, {samples}, n + samples);
        out.open_sample(0, 0);
        if (threads > 1) find_segments(run);
        parallel_for(threads, parts_, [&](std::size_t p) {
            StreamCutter<Id, Length> cutter(out, capacity_, 0, segment_[p], position_[p]);
            cutter.push_range(documents_, part_of(documents_.size(), parts_, p), position_[p + 1]);
            if (threads == 1) segment_[p + 1] = cutter.num_segments();
            run.progress.advance(part_size(p));
        });
        out.truncate(samples, segment_[parts_]);
        return out;
    }

  private:
    void find_positions(const Run& run) {
        const std::int64_t passes = run.threads > 1 ? 3 : 2;
        run.progress.add_total(passes * static_cast<std::int64_t>(documents_.size()));
        parallel_for(run.threads, parts_, [&](std::size_t p) {
            std::uint64_t tokens = 0;  // lengths are not negative: unsigned numbers widen faster
            for_each(p, [&](auto item) { tokens += std::make_unsigned_t<Length>(item.length); });
            position_[p + 1] = static_cast<std::int64_t>(tokens);
            run.progress.advance(part_size(p));
        });
        for (std::size_t p = 0; p < parts_; ++p) position_[p + 1] += position_[p];
    }
    void find_segments(const Run& run) {
        parallel_for(run.threads, parts_, [&](std::size_t p) {
            SegmentCounter counter(capacity_, position_[p]);
            for_each(p, [&](auto item) { counter.push(item.length); });
            segment_[p + 1] = counter.num_segments();
            run.progress.advance(part_size(p));
        });
        for (std::size_t p = 0; p < parts_; ++p) segment_[p + 1] += segment_[p];
    }

    template <typename Visit>
    void for_each(std::size_t p, Visit visit) const {
        const Part range = part_of(documents_.size(), parts_, p);
        const Documents<Id, Length> documents = documents_;
        for (std::size_t i = range.begin; i < range.end; ++i) visit(documents[i]);
    }
    std::int64_t part_size(std::size_t p) const {
        const Part range = part_of(documents_.size(), parts_, p);
        return static_cast<std::int64_t>(range.end - range.begin);
    }

    const Documents<Id, Length>& documents_;
    std::int64_t capacity_;
    std::size_t parts_;
    std::vector<std::int64_t> position_, segment_;  // where the parts begin, and all ends
};

}  // namespace

template <typename Id, typename Length>
Samples<Id, Length> pack_streams(const Documents<Id, Length>& documents,
                                 const std::vector<std::int64_t>& capacities, const Run& run) {
    check_capacities(capacities);
    if (capacities.size() == 1) return OneStream<Id, Length>(documents, capacities[0]).pack(run);
    Progress& progress = run.progress;
    const std::size_t n = documents.size(), buckets = capacities.size();
    const std::size_t parts = (n + kPartSize - 1) / kPartSize;
    progress.add_total(3 * static_cast<std::int64_t>(n));

    // Where each part begins: its token position in every stream, then its first segment there.
    Table position(parts, std::vector<std::int64_t>(buckets, 0)), segment = position;
    parallel_for(run.threads, parts, [&](std::size_t p) {
        const Part range = part_of(n, parts, p);
        for_each_document(documents, capacities, range,
                          [&](std::size_t b, auto item) { position[p][b] += item.length; });
        progress.advance(static_cast<std::int64_t>(range.end - range.begin));
    });
    const std::vector<std::int64_t> tokens = exclusive_prefix(position, buckets);
    parallel_for(run.threads, parts, [&](std::size_t p) {
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
    parallel_for(run.threads, parts, [&](std::size_t p) {
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

#define MEGAPACK_INSTANTIATE(Id, Length)                                                     \
    template Samples<Id, Length> pack_streams(const Documents<Id, Length>&,                  \
                                              const std::vector<std::int64_t>&, const Run&); \
    template void drop_partial_sample(Samples<Id, Length>&);
MEGAPACK_FOR_EACH_WIDTH(MEGAPACK_INSTANTIATE)

}  // namespace megapack
