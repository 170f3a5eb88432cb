// bucket_second: `bucket` for documents with a second size (images, frames, bytes), which buckets
// limit, too. This is vector bin packing in two dimensions, by a rule like Choose Pack (Leinberger,
// Karypis, Kumar, "Multi-capacity bin packing algorithms", ICPP 1999), a sample at a time.
//
// A sample should have text and images in the ratio that remains in the pool; otherwise one of
// its two capacities stays unused, sample after sample. So documents are kept in two lists: heavy
// ones have more of the second size per token than the pool, light ones do not. A sample takes the
// largest document that fits from the list that brings it back to the pool's ratio.
//
//     (tokens, second) (6, 0) (5, 0) (2, 3) (2, 2), buckets of (8, 3)
//         ->  (6, 0) (2, 3)  and  (5, 0) (2, 2)
#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "core/packing/sort.hpp"
#include "core/packing/strategy.hpp"

namespace megapack {
namespace {

__extension__ using Wide = __int128;

// Documents ordered by a major size, then by a minor size; equal ones from the last document to the
// first. Finds the last one within two limits: a tree of 16 branches has the smallest minor size of
// every node.
template <typename Id>
class SizeList {
  public:
    struct Entry {
        std::int64_t major, minor;
        Id document;
    };

    void build(std::vector<Entry> entries) {
        std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
            if (a.major != b.major) return a.major < b.major;
            if (a.minor != b.minor) return a.minor < b.minor;
            return a.document > b.document;
        });
        entries_ = std::move(entries);
        std::vector<std::int64_t> level;
        level.reserve(entries_.size());
        for (const Entry& entry : entries_) level.push_back(entry.minor);
        smallest_.push_back(std::move(level));
        while (smallest_.back().size() > 1) {
            const std::vector<std::int64_t>& below = smallest_.back();
            std::vector<std::int64_t> above((ssize(below) + kBranches - 1) / kBranches);
            for (std::int64_t node = 0; node < ssize(above); ++node)
                above[node] = smallest_of(below, node);
            smallest_.push_back(std::move(above));
        }
    }

    // Returns the last remaining entry with major and minor sizes at most these, or -1.
    std::int64_t find(std::int64_t major, std::int64_t minor) const {
        const auto after =
            std::upper_bound(entries_.begin(), entries_.end(), major,
                             [](std::int64_t m, const Entry& entry) { return m < entry.major; });
        // The node and those before it in its block, then those before the block, a level higher.
        std::int64_t node = after - entries_.begin() - 1;
        for (std::size_t level = 0; node >= 0; ++level) {
            const std::int64_t block = node / kBranches;
            for (; node >= block * kBranches; --node)
                if (smallest_[level][node] <= minor) return last_below(level, node, minor);
            node = block - 1;
        }
        return -1;
    }

    void remove(std::int64_t entry) {
        smallest_[0][entry] = kTaken;
        for (std::size_t level = 1; level < smallest_.size(); ++level) {
            entry /= kBranches;
            smallest_[level][entry] = smallest_of(smallest_[level - 1], entry);
        }
    }

    const Entry& operator[](std::int64_t entry) const { return entries_[entry]; }

  private:
    static constexpr std::int64_t kBranches = 16;
    static constexpr std::int64_t kTaken = std::numeric_limits<std::int64_t>::max();

    static std::int64_t smallest_of(const std::vector<std::int64_t>& below, std::int64_t node) {
        const auto first = below.begin() + node * kBranches;
        return *std::min_element(first, first + std::min(kBranches, below.end() - first));
    }
    std::int64_t last_below(std::size_t level, std::int64_t node, std::int64_t minor) const {
        while (level-- > 0) {
            node = std::min((node + 1) * kBranches, ssize(smallest_[level])) - 1;
            while (smallest_[level][node] > minor) --node;
        }
        return node;
    }

    std::vector<Entry> entries_;
    std::vector<std::vector<std::int64_t>> smallest_;  // minor sizes by level; kTaken: none remains
};

template <typename Id, typename Length>
struct Segment {
    Id document;
    Length begin;
    std::int32_t length;
};

template <typename Id, typename Length>
struct PackedBucket {
    std::vector<std::int64_t> sample_begin;  // first segment of every sample
    std::vector<Segment<Id, Length>> segments;

    void open_sample() { sample_begin.push_back(ssize(segments)); }
};

template <typename Id, typename Length>
class Pool {
  public:
    Pool(const Documents<Id, Length>& documents, const BucketSecondRules& rules)
        : documents_(documents),
          rules_(rules),
          largest_(rules.capacity(rules.num_buckets() - 1)),
          buckets_(rules.num_buckets()) {
        cut_chunks();
        build_lists();
    }

    std::vector<PackedBucket<Id, Length>> pack() {
        while (const Candidate first = largest_candidate()) pack_sample(first);
        return std::move(buckets_);
    }

  private:
    struct Candidate {
        bool heavy;
        std::int64_t entry;  // -1: none
        explicit operator bool() const { return entry >= 0; }
    };

    // Makes a sample of every full chunk of a document; sums the sizes of the remainders.
    void cut_chunks() {
        const PlainCut cut{largest_.tokens};
        for (std::int64_t i = 0; i < documents_.size(); ++i) {
            const auto [document, length] = documents_[i];
            for (std::int64_t k = 0; k < cut.num_chunks(length); ++k) {
                buckets_.back().open_sample();
                put(buckets_.back(), document, cut.begin(length, k), largest_.tokens);
            }
            if (cut.tail(length) == 0) continue;
            tokens_ += cut.tail(length);
            second_ += rules_.second[document];
        }
    }

    void build_lists() {
        std::array<std::vector<typename SizeList<Id>::Entry>, 2> entries;
        for (std::int64_t i = 0; i < documents_.size(); ++i) {
            const auto [document, length] = documents_[i];
            const std::int64_t tokens = length % largest_.tokens, second = rules_.second[document];
            if (tokens == 0) continue;
            if (second * tokens_ > tokens * second_)
                entries[1].push_back({second, tokens, document});
            else
                entries[0].push_back({tokens, second, document});
        }
        for (const std::size_t heavy : {0, 1}) lists_[heavy].build(std::move(entries[heavy]));
    }

    Candidate find(bool heavy, TwoSizes limit) const {
        if (heavy) return {true, lists_[1].find(limit.second, limit.tokens)};
        return {false, lists_[0].find(limit.tokens, limit.second)};
    }
    TwoSizes sizes(Candidate c) const {
        const auto& entry = lists_[c.heavy][c.entry];
        return c.heavy ? TwoSizes{entry.minor, entry.major} : TwoSizes{entry.major, entry.minor};
    }

    // The first document of a list that takes the larger share of the largest bucket.
    Candidate largest_candidate() const {
        const Candidate light = find(false, largest_), heavy = find(true, largest_);
        if (!light || !heavy) return light ? light : heavy;
        const auto share = [&](Candidate c) {
            const TwoSizes s = sizes(c);
            return std::max(Wide{s.tokens} * largest_.second, Wide{s.second} * largest_.tokens);
        };
        return share(heavy) > share(light) ? heavy : light;
    }

    void pack_sample(Candidate next) {
        const Wide tokens = tokens_, second = second_;
        const std::int64_t buckets = rules_.num_buckets();
        const TwoSizes first = sizes(next);
        std::int64_t b = 0;
        while (rules_.capacity(b).tokens < first.tokens || rules_.capacity(b).second < first.second)
            ++b;
        std::vector<Candidate> sample;
        for (TwoSizes used{0, 0}; next;) {
            const TwoSizes taken = sizes(next);
            used = {used.tokens + taken.tokens, used.second + taken.second};
            tokens_ -= taken.tokens;
            second_ -= taken.second;
            lists_[next.heavy].remove(next.entry);
            sample.push_back(next);
            const bool heavy = used.second * tokens < used.tokens * second;
            next = find_next(heavy, b, used, ssize(sample));
            if (next || !promotes(b, used)) continue;
            for (std::int64_t larger = b + 1; !next && larger < buckets; ++larger) {
                next = find_next(heavy, larger, used, ssize(sample));
                if (next) b = larger;
            }
        }
        buckets_[b].open_sample();
        for (const Candidate c : sample) {
            const Id document = lists_[c.heavy][c.entry].document;
            const std::int64_t length = sizes(c).tokens;
            put(buckets_[b], document, documents_.lengths[document] - length, length);
        }
    }

    // Returns the next document of a sample of `count` segments in bucket b, if one fits.
    Candidate find_next(bool heavy, std::int64_t b, TwoSizes used, std::int64_t count) const {
        if (count >= rules_.bucket.segment_limit(b)) return {heavy, -1};
        const TwoSizes capacity = rules_.capacity(b);
        const TwoSizes space{capacity.tokens - used.tokens, capacity.second - used.second};
        const Candidate next = find(heavy, space);
        return next ? next : find(!heavy, space);
    }
    bool promotes(std::int64_t b, TwoSizes used) const {
        return rules_.bucket.overflow == Overflow::kPromote &&
               rules_.bucket.exceeds_threshold(rules_.capacity(b).tokens - used.tokens, b);
    }

    static void put(PackedBucket<Id, Length>& bucket, Id document, std::int64_t begin,
                    std::int64_t length) {
        bucket.segments.push_back(
            {document, static_cast<Length>(begin), static_cast<std::int32_t>(length)});
    }

    const Documents<Id, Length>& documents_;
    const BucketSecondRules& rules_;
    const TwoSizes largest_;
    Wide tokens_ = 0, second_ = 0;       // of the documents that are not packed yet
    std::array<SizeList<Id>, 2> lists_;  // light, heavy
    std::vector<PackedBucket<Id, Length>> buckets_;
};

}  // namespace

void BucketSecondRules::check_rules(std::int64_t num_documents) const {
    bucket.check_rules();
    check(second.size() == num_documents && second_capacities.size() == bucket.capacities.size(),
          "there are ", num_documents, " documents and ", num_buckets(), " buckets, but ",
          second.size(), " second sizes and ", ssize(second_capacities), " second capacities");
    for (std::int64_t b = 0; b < num_buckets(); ++b)
        check(second_capacities[b] >= (b == 0 ? 0 : second_capacities[b - 1]),
              "second capacities must not descend or be negative; bucket ", b, " has ",
              second_capacities[b]);
    const std::int64_t limit = second_capacities.back();
    for (std::int64_t i = 0; i < second.size(); ++i)
        check(second[i] >= 0 && second[i] <= limit, "document ", i, " has the second size ",
              second[i], "; it must be from 0 to ", limit);
}

template <typename Id, typename Length>
Samples<Id, Length> pack_bucket_second(const Lengths<Length>& lengths,
                                       const BucketSecondRules& rules, const Run& run) {
    rules.check_rules(lengths.size());
    const std::int64_t n = lengths.size(), size = rules.bucket.pool_size;
    const std::int64_t num_pools = std::max<std::int64_t>(n / size + (n % size > 0 ? 1 : 0), 1);
    run.progress.add_total(n);
    RandomGroups<Id, Length> groups;
    if (num_pools > 1)
        groups = split_at_random<Id, Length>(lengths, num_pools,
                                             random_for(run.seed, Purpose::kPools), run.threads);
    const std::int64_t buckets = rules.num_buckets();
    std::vector<std::vector<PackedBucket<Id, Length>>> packed(num_pools);
    std::vector<std::vector<std::int64_t>> sample(num_pools), segment(num_pools);
    parallel_for(run.threads, num_pools, [&](std::int64_t p) {
        Documents<Id, Length> documents = in_file_order<Id>(lengths);
        if (num_pools > 1) {
            documents.items = groups.items.data() + groups.offsets[p];
            documents.count = groups.offsets[p + 1] - groups.offsets[p];
        }
        packed[p] = Pool<Id, Length>(documents, rules).pack();
        for (const auto& bucket : packed[p]) {
            sample[p].push_back(ssize(bucket.sample_begin));
            segment[p].push_back(ssize(bucket.segments));
        }
        run.progress.advance(documents.size());
    });
    // Samples are ordered by bucket, then by pool.
    const std::int64_t num_segments = lay_out(segment, buckets).back();
    Samples<Id, Length> out(rules.bucket.capacities, lay_out(sample, buckets), num_segments);
    parallel_for(run.threads, num_pools, [&](std::int64_t p) {
        for (std::int64_t b = 0; b < buckets; ++b) {
            std::int64_t next = sample[p][b], at = segment[p][b];
            for (const std::int64_t begin : packed[p][b].sample_begin)
                out.open_sample(next++, at + begin);
            for (const auto& s : packed[p][b].segments)
                out.put(at++, s.document, s.begin, s.length);
            packed[p][b] = {};
        }
    });
    return out;
}

MEGAPACK_INSTANTIATE_STRATEGY(bucket_second, BucketSecondRules);

}  // namespace megapack
