#include "core/packing/bucket_stream.hpp"

#include <algorithm>
#include <queue>
#include <tuple>
#include <utility>

#include "core/packing/order.hpp"

namespace megapack {
namespace {

constexpr std::int64_t kReportEvery = std::int64_t{1} << 16;

// First in, first out, per class; all classes share one array of nodes.
template <typename T>
class ClassQueues {
  public:
    explicit ClassQueues(std::int64_t classes) : front_(classes, -1), back_(classes, -1) {}

    void push(std::int64_t c, const T& value) {
        std::int64_t node = free_;
        if (node >= 0) {
            free_ = next_[node];
        } else {
            node = static_cast<std::int64_t>(values_.size());
            values_.emplace_back();
            next_.emplace_back();
        }
        values_[node] = value;
        next_[node] = -1;
        if (front_[c] < 0) {
            front_[c] = node;
        } else {
            next_[back_[c]] = node;
        }
        back_[c] = node;
    }
    T pop(std::int64_t c) {
        const auto node = front_[c];
        front_[c] = next_[node];
        next_[node] = std::exchange(free_, static_cast<std::int64_t>(node));
        return values_[node];
    }

  private:
    std::vector<std::int64_t> front_, back_;  // per class, -1: none
    std::vector<T> values_;
    std::vector<std::int64_t> next_;
    std::int64_t free_ = -1;
};

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

    // One sample.
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
        std::vector<std::int64_t> counts;
        std::int64_t segments = 0, sample = 0, at = 0;
        for (const Bucket& bucket : buckets_) {
            counts.push_back(static_cast<std::int64_t>(bucket.sample_begin.size()));
            segments += static_cast<std::int64_t>(bucket.segments.size());
        }
        Samples<Id, Length> out(rules_.capacities, counts, segments);
        for (Bucket& bucket : buckets_) {
            for (const std::int64_t begin : bucket.sample_begin)
                out.open_sample(sample++, at + static_cast<std::int64_t>(begin));
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
            for (std::int64_t k = segments.size() - sample_begin.back(); k-- > 1;)
                std::swap(first[k], first[chance.below(k, k + 1)]);
        }
    };

    // The pool's longest document is longer than the largest bucket: its first tokens fill one.
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
    std::priority_queue<LongDocument> long_;  // (length, -arrival, document, begin)
    std::vector<Bucket> buckets_;
};

}  // namespace

template <typename Id, typename Length>
Samples<Id, Length> pack_bucket_stream(const Lengths<Length>& lengths, const BucketRules& rules,
                                       const Run& run) {
    rules.check_rules();
    run.progress.add_total(lengths.size());
    const auto order =
        shuffle<Id, Length>(lengths, random_for(run.seed, Purpose::kDocuments), run.threads);
    StreamingPool<Id, Length> pool(rules, random_for(run.seed, Purpose::kSegments));
    for (std::int64_t i = 0; i < order.size(); ++i) {
        if (order[i].length > 0) {
            pool.add(order[i].document, 0, order[i].length);
            if (pool.size() >= rules.pool_size) pool.generate();
        }
        if ((i + 1) % kReportEvery == 0) run.progress.advance(kReportEvery);
    }
    while (pool.size() > 0) pool.generate();
    return pool.samples();
}

MEGAPACK_INSTANTIATE_STRATEGY(pack_bucket_stream, BucketRules);

}  // namespace megapack
