// The bucket strategies. `bucket` plans whole pools from their histograms (bucket_plan.hpp) and
// writes the plan (PoolWriter); `bucket_stream` packs a sample per added document, like Algorithm 1
// of BucketLLM (StreamingPool).
#include <algorithm>
#include <atomic>
#include <memory>
#include <queue>
#include <tuple>
#include <utility>

#include "core/packing/bucket_plan.hpp"
#include "core/packing/columns.hpp"

namespace megapack {
namespace {

struct Cursor {
    std::int64_t sample, segment;
};

template <typename Id, typename Length>
void shuffle_segments(const Samples<Id, Length>& samples, std::int64_t begin, std::int64_t end,
                      Random chance) {
    swap_at_random(end - begin, chance, [&](std::int64_t k, std::int64_t j) {
        std::swap(samples.segment_document[begin + k], samples.segment_document[begin + j]);
        std::swap(samples.segment_begin[begin + k], samples.segment_begin[begin + j]);
        std::swap(samples.segment_length[begin + k], samples.segment_length[begin + j]);
    });
}

// Writes the samples of one pool. `sample` and `segment`: numbers of the first in each bucket.
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
        out_.put(at.segment + chunk, document, begin, out_.bucket_capacity.back());
    }

    // `shuffled`: puts the segments of sample i of the plan in the order of chance.child(i).
    void write_plan(const SortedRests<Id>& sorted, std::int64_t num_chunks, bool shuffled,
                    Random chance) {
        cursors_.back().sample += num_chunks;
        cursors_.back().segment += num_chunks;
        resolve_heads(sorted);
        std::int64_t entry = 0;
        std::int64_t ordinal = 0;
        for (const Pattern& pattern : plan_.patterns) {
            Cursor& at = cursors_[pattern.bucket];
            const std::int64_t width = write_pattern(pattern, entry, sorted, at);
            if (shuffled && width > 1)
                for (std::int64_t i = 0; i < pattern.count; ++i)
                    shuffle_segments(out_, at.segment + i * width, at.segment + (i + 1) * width,
                                     chance.child(ordinal + i));
            ordinal += pattern.count;
            at.sample += pattern.count;
            at.segment += pattern.count * width;
            if (pattern.head >= 0) write_head(pattern.head, at);
            entry = pattern.end_entry;
        }
    }

  private:
    using Place = Rest<Id, Length>;

    // Writes a pattern without its head; returns the segments per sample.
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
        return ssize(columns_);
    }

    // Writes a pattern in which some documents are remainders of heads.
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
        return rank < sorted.class_begin[length + 1] - sorted.class_begin[length];
    }

    // Returns document `rank` of a class: a sorted rest, or the remainder of a head.
    Place find(const SortedRests<Id>& sorted, std::int64_t length, std::int64_t rank) const {
        const std::int64_t begin = sorted.class_begin[length];
        if (is_sorted(sorted, length, rank))
            return Place(sorted.ids[begin + rank], length, lengths_);
        const std::int64_t h =
            std::lower_bound(added_.begin(), added_.end(), Added{length, rank, 0})->head;
        Place place = heads_[h];
        place.begin = static_cast<Length>(place.begin + plan_.heads[h].tokens);
        return place;
    }

    // Finds the documents of the heads; a later head may be cut from the rest of an earlier one.
    void resolve_heads(const SortedRests<Id>& sorted) {
        for (std::int64_t h = 0; h < ssize(plan_.heads); ++h) {
            const Head& head = plan_.heads[h];
            added_.push_back({head.length - head.tokens, head.rest_rank, h});
        }
        std::sort(added_.begin(), added_.end());
        for (const Head& head : plan_.heads) heads_.push_back(find(sorted, head.length, head.rank));
    }

    // The remainder of head `head` is document `rank` of class `length`.
    struct Added {
        std::int64_t length, rank, head;

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

// A queue per class; all classes share one array of nodes.
template <typename T>
class ClassQueues {
  public:
    explicit ClassQueues(std::int64_t classes) : front_(classes, -1), back_(classes, -1) {}

    void push(std::int64_t c, const T& value) {
        std::int64_t node = free_;
        if (node >= 0) {
            free_ = next_[node];
        } else {
            node = ssize(values_);
            values_.emplace_back();
            next_.emplace_back();
        }
        values_[node] = value;
        next_[node] = -1;
        (front_[c] < 0 ? front_[c] : next_[back_[c]]) = node;
        back_[c] = node;
    }
    T pop(std::int64_t c) {
        const std::int64_t node = front_[c];
        front_[c] = next_[node];
        next_[node] = std::exchange(free_, node);
        return values_[node];
    }

  private:
    std::vector<std::int64_t> front_, back_;  // per class, -1: empty
    std::vector<T> values_;
    std::vector<std::int64_t> next_;
    std::int64_t free_ = -1;
};

// The pool of `bucket_stream`: documents come in one by one, `generate` packs one sample.
template <typename Id, typename Length>
class StreamingPool {
  public:
    StreamingPool(const BucketRules& rules, Random chance)
        : rules_(rules),
          largest_(rules.capacities.back()),
          chance_(chance),
          planner_(std::vector<std::int64_t>(largest_ + 1), rules),
          queues_(largest_ + 1),
          buckets_(rules.capacities.size()) {}

    // Reserves memory for all cut pieces, so that a lack of memory is an error at the start.
    void reserve(Span<const Length> lengths) {
        std::size_t pieces = 0;
        for (const std::int64_t length : lengths)
            if (length > largest_) pieces += (length - 1) / largest_;
        std::vector<Segment>& segments = buckets_.back().segments;
        segments.reserve(std::min(pieces, segments.max_size()));
    }

    void add(Id document, Length begin, std::int64_t length) {
        ++size_;
        if (length > largest_) {
            long_.push({length, -ticket_++, document, begin});
            return;
        }
        queues_.push(length, {document, begin});
        planner_.add(length);
    }

    std::int64_t size() const { return size_; }

    // Packs one sample.
    void generate() {
        const Random chance = chance_.child(ordinal_++);
        if (!long_.empty()) {
            cut_longest();
            return;
        }
        planner_.plan.patterns.clear();
        planner_.plan.entries.clear();
        planner_.plan.heads.clear();
        planner_.next(1);
        const Pattern& pattern = planner_.plan.patterns[0];
        Bucket& bucket = buckets_[pattern.bucket];
        bucket.sample_begin.push_back(bucket.segments.size());
        for (const PatternEntry& entry : planner_.plan.entries)
            for (std::int32_t j = 0; j < entry.copies; ++j)
                bucket.put(take(entry.length), entry.length);
        if (rules_.shuffle_segments) bucket.shuffle_last(chance);
        if (pattern.head >= 0) put_head(bucket, planner_.plan.heads[0]);
    }

    Samples<Id, Length> samples() {
        std::vector<std::int64_t> first{0};
        std::int64_t segments = 0, sample = 0, at = 0;
        for (const Bucket& bucket : buckets_) {
            first.push_back(first.back() + ssize(bucket.sample_begin));
            segments += ssize(bucket.segments);
        }
        Samples<Id, Length> out(rules_.capacities, first, segments);
        for (Bucket& bucket : buckets_) {
            for (const std::int64_t begin : bucket.sample_begin)
                out.open_sample(sample++, at + begin);
            for (const Segment& s : bucket.segments) out.put(at++, s.document, s.begin, s.length);
            bucket = {};
        }
        return out;
    }

  private:
    struct Piece {
        Id document;
        Length begin;
    };
    struct Segment {
        Id document;
        Length begin;
        std::int32_t length;
    };
    struct Bucket {
        std::vector<std::int64_t> sample_begin;
        std::vector<Segment> segments;

        void put(Piece piece, std::int64_t length) {
            segments.push_back({piece.document, piece.begin, static_cast<std::int32_t>(length)});
        }
        void shuffle_last(Random chance) {
            Segment* first = segments.data() + sample_begin.back();
            swap_at_random(ssize(segments) - sample_begin.back(), chance,
                           [&](std::int64_t k, std::int64_t j) { std::swap(first[k], first[j]); });
        }
    };

    // Fills a sample of the largest bucket with the first tokens of the longest document.
    void cut_longest() {
        const auto [length, ticket, document, begin] = long_.top();
        long_.pop();
        --size_;
        Bucket& bucket = buckets_.back();
        bucket.sample_begin.push_back(bucket.segments.size());
        bucket.put({document, begin}, largest_);
        add(document, static_cast<Length>(begin + largest_), length - largest_);
    }

    void put_head(Bucket& bucket, const Head& head) {
        const Piece piece = take(head.length);
        bucket.put(piece, head.tokens);
        const auto begin = static_cast<Length>(piece.begin + head.tokens);
        queues_.push(head.length - head.tokens, {piece.document, begin});
        ++size_;
    }

    Piece take(std::int64_t length) {
        --size_;
        return queues_.pop(length);
    }

    using LongDocument = std::tuple<std::int64_t, std::int64_t, Id, Length>;

    const BucketRules& rules_;
    std::int64_t largest_, size_ = 0, ticket_ = 0;
    std::uint64_t ordinal_ = 0;
    Random chance_;
    BucketPlanner planner_;
    ClassQueues<Piece> queues_;
    std::priority_queue<LongDocument> long_;  // (length, -ticket, document, begin)
    std::vector<Bucket> buckets_;
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
    RandomGroups<Id, Length> pools;
    if (num_pools > 1)
        pools = split_at_random<Id, Length>(lengths, num_pools,
                                            random_for(run.seed, Purpose::kPools), run.threads);
    const auto pool = [&](std::int64_t p) -> Documents<Id, Length> {
        if (num_pools == 1) return in_file_order<Id>(lengths);
        Documents<Id, Length> documents{lengths, pools.items.data() + pools.offsets[p],
                                        pools.offsets[p + 1] - pools.offsets[p],
                                        lengths.totals().longest};
        if (documents.longest <= documents.size()) return documents;
        // A small pool gets a short histogram, up to its longest document.
        documents.longest = 0;
        for (std::int64_t i = 0; i < documents.size(); ++i)
            documents.longest = std::max<std::int64_t>(documents.longest, documents[i].length);
        return documents;
    };

    const std::int64_t buckets = ssize(rules.capacities);
    std::vector<BucketPlan> plans(num_pools);
    std::vector<std::int64_t> chunks(num_pools);
    // Plans and histograms of many small pools need more memory than the documents: those beyond
    // these limits are discarded and made again when the pool is written.
    const std::int64_t kept_limit = (std::int64_t{1} << 26) + n, sort_limit = (1 << 20) + n;
    std::atomic<std::int64_t> kept_bytes{0}, sort_bytes{0};
    using Sort = LengthSort<Id, Length>;
    std::vector<std::unique_ptr<Sort>> sorts(num_pools);
    const auto count_pool = [&](std::int64_t p) {
        return std::make_unique<Sort>(pool(p), PlainCut{rules.capacities.back()}, 1);
    };
    parallel_for(run.threads, num_pools, [&](std::int64_t p) {
        auto sort = count_pool(p);
        plans[p] = plan_buckets(sort->counts(), rules);
        chunks[p] = sort->num_chunks();
        if ((kept_bytes += plans[p].num_bytes()) > kept_limit) plans[p].forget_samples();
        if ((sort_bytes += sort->num_bytes()) <= sort_limit) sorts[p] = std::move(sort);
        run.progress.advance(pool(p).size());
    });

    // Samples are ordered by bucket, then by pool; a pool's largest bucket starts with full chunks.
    std::vector<std::vector<std::int64_t>> sample(num_pools), segment(num_pools);
    for (std::int64_t p = 0; p < num_pools; ++p) {
        sample[p] = plans[p].samples_in_bucket;
        segment[p] = plans[p].segments_in_bucket;
        sample[p].back() += chunks[p];
        segment[p].back() += chunks[p];
    }
    const std::int64_t num_segments = lay_out(segment, buckets).back();
    Samples<Id, Length> out(rules.capacities, lay_out(sample, buckets), num_segments);
    parallel_for(run.threads, num_pools, [&](std::int64_t p) {
        const std::unique_ptr<Sort> sort = sorts[p] ? std::move(sorts[p]) : count_pool(p);
        BucketPlan plan = std::move(plans[p]);
        if (plan.patterns.empty()) plan = plan_buckets(sort->counts(), rules);
        PoolWriter<Id, Length> writer(out, plan, lengths, sample[p], segment[p]);
        const auto sorted = sort->sort([&](std::int64_t chunk, Id document, Length begin) {
            writer.write_chunk(chunk, document, begin);
        });
        writer.write_plan(sorted, sort->num_chunks(), rules.shuffle_segments,
                          random_for(run.seed, Purpose::kSegments).child(p));
        run.progress.advance(pool(p).size());
        if (num_pools > 1) pools.items.discard(pools.offsets[p], pools.offsets[p + 1]);
    });
    return out;
}

template <typename Id, typename Length>
Samples<Id, Length> pack_bucket_stream(const Lengths<Length>& lengths, const BucketRules& rules,
                                       const Run& run) {
    constexpr std::int64_t kReportEvery = std::int64_t{1} << 16;
    rules.check_rules();
    run.progress.add_total(lengths.size());
    const auto order =
        shuffle<Id, Length>(lengths, random_for(run.seed, Purpose::kDocuments), run.threads);
    StreamingPool<Id, Length> pool(rules, random_for(run.seed, Purpose::kSegments));
    pool.reserve(lengths);
    std::int64_t num_samples = 0;
    const auto generate = [&] {
        pool.generate();
        if (++num_samples % kReportEvery == 0) run.progress.advance(0);  // lets Ctrl-C stop it
    };
    for (std::int64_t i = 0; i < order.size(); ++i) {
        if (i > 0 && i % kReportEvery == 0) run.progress.advance(kReportEvery);
        if (order[i].length == 0) continue;
        pool.add(order[i].document, 0, order[i].length);
        if (pool.size() >= rules.pool_size) generate();
    }
    while (pool.size() > 0) generate();
    return pool.samples();
}

MEGAPACK_INSTANTIATE_STRATEGY(bucket, BucketRules);
MEGAPACK_INSTANTIATE_STRATEGY(bucket_stream, BucketRules);

}  // namespace megapack
