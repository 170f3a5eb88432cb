#include "core/packing_bucket.hpp"

#include <numeric>
#include <utility>

#include "core/packing_order.hpp"
#include "core/packing_sort.hpp"

namespace megapack {
namespace {

struct Cursor {
    std::int64_t sample, segment;
};

// Writes the samples of one pool.
template <typename Id, typename Length>
class PoolWriter {
  public:
    PoolWriter(const Samples<Id, Length>& out, const BucketPlan& plan, Span<const Length> lengths,
               std::vector<Cursor> cursors)
        : out_(out), plan_(plan), lengths_(lengths), cursors_(std::move(cursors)) {}

    void write_chunk(std::int64_t chunk, Id document, Length begin) {
        const Cursor& at = cursors_.back();
        out_.open_sample(at.sample + chunk, at.segment + chunk);
        out_.put(at.segment + chunk, document, begin,
                 static_cast<std::int32_t>(out_.bucket_capacity.back()));
    }

    void write_plan(const typename LengthSort<Id, Length>::Sorted& sorted,
                    std::int64_t num_chunks) {
        cursors_.back().sample += num_chunks;
        cursors_.back().segment += num_chunks;
        std::size_t entry = 0;
        for (const Pattern& pattern : plan_.patterns) {
            Cursor& at = cursors_[static_cast<std::size_t>(pattern.bucket)];
            for (std::int64_t i = 0; i < pattern.count; ++i) {
                out_.open_sample(at.sample++, at.segment);
                for (std::size_t e = entry; e < pattern.end_entry; ++e)
                    at.segment = write_entry(sorted, plan_.entries[e], i, at.segment);
            }
            entry = pattern.end_entry;
        }
    }

  private:
    std::int64_t write_entry(const typename LengthSort<Id, Length>::Sorted& sorted,
                             const PatternEntry& entry, std::int64_t i, std::int64_t segment) {
        const std::int64_t first = sorted.class_begin[static_cast<std::size_t>(entry.length)] +
                                   entry.rank + i * entry.copies;
        for (std::int64_t j = 0; j < entry.copies; ++j) {
            const Id id = sorted.ids[static_cast<std::size_t>(first + j)];
            const Rest<Id, Length> rest(id, entry.length, lengths_);
            out_.put(segment++, rest.document, rest.begin, entry.length);
        }
        return segment;
    }

    const Samples<Id, Length>& out_;
    const BucketPlan& plan_;
    Span<const Length> lengths_;
    std::vector<Cursor> cursors_;
};

}  // namespace

template <typename Id, typename Length>
Samples<Id, Length> pack_buckets(Span<const Length> lengths, const BucketRules& rules,
                                 std::int64_t pool_size, std::uint64_t seed, int threads,
                                 Progress& progress) {
    const auto n = static_cast<std::int64_t>(lengths.size());
    const auto num_pools =
        static_cast<std::size_t>(std::max<std::int64_t>((n + pool_size - 1) / pool_size, 1));
    progress.add_total(2 * n);
    Dealt<Id, Length> dealt;
    if (num_pools > 1)
        dealt = deal<Id, Length>(lengths, num_pools, random_for(seed, Purpose::kPools), threads);
    const auto pool = [&](std::size_t p) -> Documents<Id, Length> {
        if (num_pools == 1) return in_file_order<Id>(lengths);
        return {lengths, dealt.items.data() + dealt.offsets[p],
                dealt.offsets[p + 1] - dealt.offsets[p], 0};
    };

    const std::size_t buckets = rules.capacities.size();
    std::vector<BucketPlan> plans(num_pools);
    std::vector<std::int64_t> chunks(num_pools);
    parallel_for(threads, num_pools, [&](std::size_t p) {
        const LengthSort<Id, Length> sort(pool(p), rules.capacities.back(), 1);
        plans[p] = plan_buckets(sort.counts(), rules);
        chunks[p] = sort.num_chunks();
        progress.advance(static_cast<std::int64_t>(pool(p).size()));
    });

    // Bucket after bucket, and in a bucket pool after pool.
    std::vector<std::vector<Cursor>> cursors(num_pools, std::vector<Cursor>(buckets));
    std::vector<std::int64_t> samples_in_bucket(buckets, 0);
    Cursor next{0, 0};
    for (std::size_t b = 0; b < buckets; ++b) {
        const std::int64_t first = next.sample;
        for (std::size_t p = 0; p < num_pools; ++p) {
            const std::int64_t own = b + 1 == buckets ? chunks[p] : 0;
            cursors[p][b] = next;
            next.sample += plans[p].samples_in_bucket[b] + own;
            next.segment += plans[p].segments_in_bucket[b] + own;
        }
        samples_in_bucket[b] = next.sample - first;
    }
    Samples<Id, Length> out(rules.capacities, samples_in_bucket, next.segment);
    parallel_for(threads, num_pools, [&](std::size_t p) {
        LengthSort<Id, Length> sort(pool(p), rules.capacities.back(), 1);
        PoolWriter<Id, Length> writer(out, plans[p], lengths, cursors[p]);
        const auto sorted = sort.sort([&](std::int64_t chunk, Id document, Length begin) {
            writer.write_chunk(chunk, document, begin);
        });
        writer.write_plan(sorted, sort.num_chunks());
        progress.advance(static_cast<std::int64_t>(pool(p).size()));
    });
    return out;
}

#define MEGAPACK_INSTANTIATE(Id, Length)                                              \
    template Samples<Id, Length> pack_buckets(Span<const Length>, const BucketRules&, \
                                              std::int64_t, std::uint64_t, int, Progress&);
MEGAPACK_FOR_EACH_WIDTH(MEGAPACK_INSTANTIATE)

}  // namespace megapack
