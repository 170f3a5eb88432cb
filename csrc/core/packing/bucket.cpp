#include "core/packing/bucket.hpp"

#include <algorithm>
#include <atomic>
#include <utility>

#include "core/packing/columns.hpp"
#include "core/packing/order.hpp"

namespace megapack {
namespace {

struct Cursor {
    std::int64_t sample, segment;
};

// Puts the segments [begin, end) in seeded order: for k = size - 1 ... 1, segment k is swapped with
// segment chance.below(k, k + 1).
template <typename Id, typename Length>
void shuffle_segments(const Samples<Id, Length>& samples, std::int64_t begin, std::int64_t end,
                      Random chance) {
    for (std::int64_t k = end - begin; k-- > 1;) {
        const std::int64_t i = begin + k;
        const auto j = begin + static_cast<std::int64_t>(chance.below(k, k + 1));
        std::swap(samples.segment_document[i], samples.segment_document[j]);
        std::swap(samples.segment_begin[i], samples.segment_begin[j]);
        std::swap(samples.segment_length[i], samples.segment_length[j]);
    }
}

// Writes the samples of one pool, in each bucket from a sample and a segment on.
template <typename Id, typename Length>
class PoolWriter {
  public:
    PoolWriter(const Samples<Id, Length>& out, const BucketPlan& plan, Span<const Length> lengths,
               const std::vector<std::int64_t>& sample, const std::vector<std::int64_t>& segment)
        : out_(out), plan_(plan), lengths_(lengths) {
        for (std::int64_t b = 0; b < ssize(sample); ++b)
            cursors_.push_back({sample[b], segment[b]});
    }

    void write_chunk(std::int64_t chunk, Id document, Length begin) {
        const Cursor& at = cursors_.back();
        out_.open_sample(at.sample + chunk, at.segment + chunk);
        out_.put(at.segment + chunk, document, begin,
                 static_cast<std::int32_t>(out_.bucket_capacity.back()));
    }

    // `shuffled`: sample i of the plan has its segments in the order of chance.child(i).
    void write_plan(const SortedRests<Id>& sorted, std::int64_t num_chunks, bool shuffled,
                    Random chance) {
        cursors_.back().sample += num_chunks;
        cursors_.back().segment += num_chunks;
        resolve_heads(sorted);
        std::int64_t entry = 0;
        std::uint64_t ordinal = 0;
        for (const Pattern& pattern : plan_.patterns) {
            Cursor& at = cursors_[pattern.bucket];
            const std::int64_t width = write_pattern(pattern, entry, sorted, at);
            if (shuffled && width > 1)
                for (std::int64_t i = 0; i < pattern.count; ++i)
                    shuffle_segments(out_, at.segment + i * width, at.segment + (i + 1) * width,
                                     chance.child(ordinal + static_cast<std::uint64_t>(i)));
            ordinal += static_cast<std::uint64_t>(pattern.count);
            at.sample += pattern.count;
            at.segment += pattern.count * width;
            if (pattern.head >= 0) write_head(pattern.head, at);
            entry = pattern.end_entry;
        }
    }

  private:
    using Place = Rest<Id, Length>;

    // Everything but the head; segments per sample.
    std::int64_t write_pattern(const Pattern& pattern, std::int64_t entry,
                               const SortedRests<Id>& sorted, const Cursor& at) {
        columns_.clear();
        bool all_sorted = true;
        for (; entry < pattern.end_entry; ++entry) {
            const PatternEntry& e = plan_.entries[entry];
            const std::int64_t begin = sorted.class_begin[e.length];
            all_sorted &= is_sorted(sorted, e.length, e.rank + pattern.count * e.copies - 1);
            for (std::int64_t j = 0; j < e.copies; ++j)
                columns_.push_back({begin + e.rank + j, e.copies, e.length, e.length});
        }
        if (all_sorted) {
            write_columns(out_, columns_, sorted, lengths_, 0, pattern.count, at.sample,
                          at.segment);
        } else {
            write_one_by_one(pattern.count, sorted, at);
        }
        return static_cast<std::int64_t>(columns_.size());
    }

    // The same where some documents are what a head has left.
    void write_one_by_one(std::int64_t count, const SortedRests<Id>& sorted, Cursor at) const {
        for (std::int64_t i = 0; i < count; ++i) {
            out_.open_sample(at.sample++, at.segment);
            for (const Column& column : columns_) {
                const std::int64_t begin = sorted.class_begin[column.length];
                const std::int64_t rank = column.first - begin + i * column.stride;
                const Place place = find(sorted, column.length, rank);
                out_.put(at.segment++, place.document, place.begin, column.length);
            }
        }
    }

    void write_head(std::int64_t head, Cursor& at) const {
        const Place& place = heads_[head];
        out_.put(at.segment++, place.document, place.begin, plan_.heads[head].tokens);
    }

    bool is_sorted(const SortedRests<Id>& sorted, std::int64_t length, std::int64_t rank) const {
        const auto l = length;
        return rank < sorted.class_begin[l + 1] - sorted.class_begin[l];
    }

    // Number `rank` of a class: one of the sorted rests, or what a head left of its document.
    Place find(const SortedRests<Id>& sorted, std::int64_t length, std::int64_t rank) const {
        const std::int64_t begin = sorted.class_begin[length];
        if (is_sorted(sorted, length, rank))
            return Place(sorted.ids[begin + rank], length, lengths_);
        const auto h = static_cast<std::int64_t>(
            std::lower_bound(added_.begin(), added_.end(), Added{length, rank, 0})->head);
        Place place = heads_[h];
        place.begin = static_cast<Length>(place.begin + plan_.heads[h].tokens);
        return place;
    }

    // Which documents the heads are of; what one leaves may be what a later one takes from.
    void resolve_heads(const SortedRests<Id>& sorted) {
        for (std::int64_t h = 0; h < ssize(plan_.heads); ++h) {
            const Head& head = plan_.heads[h];
            added_.push_back({head.length - head.tokens, head.rest_rank, h});
        }
        std::sort(added_.begin(), added_.end());
        for (const Head& head : plan_.heads) heads_.push_back(find(sorted, head.length, head.rank));
    }

    // What head `head` left of its document is number `rank` of its class.
    struct Added {
        std::int64_t length, rank;
        std::int64_t head;

        bool operator<(const Added& other) const {
            return length != other.length ? length < other.length : rank < other.rank;
        }
    };

    const Samples<Id, Length>& out_;
    const BucketPlan& plan_;
    Span<const Length> lengths_;
    std::vector<Cursor> cursors_;
    std::vector<Column> columns_;
    std::vector<Place> heads_;
    std::vector<Added> added_;
};

}  // namespace

template <typename Id, typename Length>
Samples<Id, Length> pack_bucket(const Lengths<Length>& lengths, const BucketRules& rules,
                                const Run& run) {
    rules.check_rules();
    const std::int64_t n = lengths.size(), size = rules.pool_size;
    const std::int64_t num_pools = std::max<std::int64_t>(n / size + (n % size > 0 ? 1 : 0), 1);
    check(rules.given.empty() || num_pools == 1, "given patterns need one pool, not ", num_pools);
    run.progress.add_total(2 * n);
    Dealt<Id, Length> dealt;
    if (num_pools > 1)
        dealt = deal<Id, Length>(lengths, num_pools, random_for(run.seed, Purpose::kPools),
                                 run.threads);
    const auto pool = [&](std::int64_t p) -> Documents<Id, Length> {
        if (num_pools == 1) return in_file_order<Id>(lengths);
        return {lengths, dealt.items.data() + dealt.offsets[p],
                dealt.offsets[p + 1] - dealt.offsets[p], lengths.totals().longest};
    };

    const std::int64_t buckets = ssize(rules.capacities);
    std::vector<BucketPlan> plans(num_pools);
    std::vector<std::int64_t> chunks(num_pools);
    // Plans of many small pools outgrow the documents: what is beyond this is made a second time.
    const std::int64_t kept_limit = (std::int64_t{1} << 26) + n;
    std::atomic<std::int64_t> kept_bytes{0};
    parallel_for(run.threads, num_pools, [&](std::int64_t p) {
        const LengthSort<Id, Length> sort(pool(p), PlainCut{rules.capacities.back()}, 1);
        plans[p] = plan_buckets(sort.counts(), rules);
        chunks[p] = sort.num_chunks();
        if ((kept_bytes += plans[p].num_bytes()) > kept_limit) plans[p].forget_samples();
        run.progress.advance(pool(p).size());
    });

    // Bucket after bucket, and in a bucket pool after pool; the full chunks stand first in the
    // last.
    std::vector<std::vector<std::int64_t>> sample(num_pools), segment(num_pools);
    for (std::int64_t p = 0; p < num_pools; ++p) {
        sample[p] = plans[p].samples_in_bucket;
        segment[p] = plans[p].segments_in_bucket;
        sample[p].back() += chunks[p];
        segment[p].back() += chunks[p];
    }
    const std::vector<std::int64_t> sample_begin = lay_out(sample, buckets);
    const std::int64_t num_segments = lay_out(segment, buckets).back();
    std::vector<std::int64_t> counts;
    for (std::int64_t b = 0; b < buckets; ++b)
        counts.push_back(sample_begin[b + 1] - sample_begin[b]);
    Samples<Id, Length> out(rules.capacities, counts, num_segments);
    parallel_for(run.threads, num_pools, [&](std::int64_t p) {
        LengthSort<Id, Length> sort(pool(p), PlainCut{rules.capacities.back()}, 1);
        BucketPlan plan = std::move(plans[p]);
        if (plan.patterns.empty()) plan = plan_buckets(sort.counts(), rules);
        PoolWriter<Id, Length> writer(out, plan, lengths, sample[p], segment[p]);
        const auto sorted = sort.sort([&](std::int64_t chunk, Id document, Length begin) {
            writer.write_chunk(chunk, document, begin);
        });
        writer.write_plan(sorted, sort.num_chunks(), rules.shuffle_segments,
                          random_for(run.seed, Purpose::kSegments).child(p));
        run.progress.advance(pool(p).size());
        if (num_pools > 1) dealt.items.discard(dealt.offsets[p], dealt.offsets[p + 1]);
    });
    return out;
}

MEGAPACK_INSTANTIATE_STRATEGY(pack_bucket, BucketRules);

}  // namespace megapack
