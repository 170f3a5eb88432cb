// Every strategy under the sanitizers, for random and extreme lengths, all widths, one thread and
// several: samples keep the laws and no access is outside an array. Tests in Python compare the
// samples with the definitions.
#include <algorithm>
#include <functional>
#include <numeric>

#include "core/base/random.hpp"
#include "core/index/metrics.hpp"
#include "core/packing/strategy.hpp"
#include "packing.hpp"

namespace {

using namespace megapack;

template <typename Id, typename Length>
using Pack = std::function<Samples<Id, Length>(const Lengths<Length>&, const Run&)>;

template <typename Id, typename Length>
void check_packing(const std::string& name, const Samples<Id, Length>& samples,
                   const std::vector<Length>& lengths) {
    const auto view = view_of(samples);
    const Integers documents{Span<const Length>(lengths)};
    check_laws(view, samples.bucket_capacity, documents);
    const SegmentTotals totals = measure(view, ssize(lengths));
    const auto placed = std::accumulate(totals.tokens_per_bucket.begin(),
                                        totals.tokens_per_bucket.end(), std::int64_t{0});
    const auto tokens = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
    require(tokens == placed - samples.repeated_tokens + samples.dropped_tokens,
            name + ": tokens are unaccounted for");
    const auto labels = label_tokens(view, documents);
    require(std::accumulate(labels.begin(), labels.end(), std::int64_t{0}) <= placed,
            name + ": more labels than tokens");
    const auto costs = attention_cost(view);
    require(std::accumulate(costs.begin(), costs.end(), std::int64_t{0}) == totals.segment_squares,
            name + ": attention cost");
}

template <typename T>
bool equal(const Buffer<T>& a, const Buffer<T>& b) {
    return a.size() == b.size() && std::equal(a.data(), a.data() + a.size(), b.data());
}

template <typename Id, typename Length>
void run(const std::string& name, const Pack<Id, Length>& pack,
         const std::vector<Length>& lengths) {
    Progress silent;
    const Lengths<Length> checked{Span<const Length>(lengths)};
    const Samples<Id, Length> one = pack(checked, Run(3, 1, silent));
    check_packing(name, one, lengths);
    const Samples<Id, Length> four = pack(checked, Run(3, 4, silent));
    require(one.bucket_sample_offsets == four.bucket_sample_offsets &&
                equal(one.sample_segment_offsets, four.sample_segment_offsets) &&
                equal(one.segment_document, four.segment_document) &&
                equal(one.segment_begin, four.segment_begin) &&
                equal(one.segment_length, four.segment_length),
            name + ": depends on the number of threads");
}

template <typename Id, typename Length>
void run_all(const std::vector<Length>& lengths, std::int64_t capacity) {
    // Runs pack_<name> with these rules.
#define MEGAPACK_RUN(name, ...)                        \
    run<Id, Length>(                                   \
        #name,                                         \
        [&](const Lengths<Length>& x, const Run& r) {  \
            return pack_##name<Id>(x, __VA_ARGS__, r); \
        },                                             \
        lengths)

    const std::vector<std::int64_t> buckets{capacity, 2 * capacity + 1, 5 * capacity};
    MEGAPACK_RUN(bucket_naive, BucketNaiveRules{buckets, false});
    for (const std::int64_t atom : {std::int64_t{1}, capacity, 3 * capacity}) {
        MEGAPACK_RUN(pad, PadRules{{capacity, atom}});
        for (const bool choice : {false, true})
            MEGAPACK_RUN(concat, ConcatRules{{capacity, atom}, choice, choice});
    }
    MEGAPACK_RUN(next_fit, NextFitRules{capacity});
    MEGAPACK_RUN(length_sorted, LengthSortedRules{capacity});
    for (const std::int64_t extra : {0, 3}) {
        for (const Fit fit : {Fit::kFirst, Fit::kBest})
            MEGAPACK_RUN(fit_decreasing, FitRules{capacity, extra, fit});
        for (const Placement placement :
             {Placement::kExact, Placement::kPaper, Placement::kPublished})
            MEGAPACK_RUN(seamless, SeamlessRules{capacity, Ratio(2, 5), placement, extra});
    }
    for (const std::int64_t pool_size : {1, 7, 1000}) {
        for (const Overflow overflow : {Overflow::kPad, Overflow::kHead, Overflow::kPromote}) {
            const bool head = overflow == Overflow::kHead;
            BucketRules rules{buckets, overflow, Ratio(1, 20), head, head, false, pool_size, 0, {}};
            MEGAPACK_RUN(bucket, rules);
            MEGAPACK_RUN(bucket_stream, rules);
            rules.lookahead = overflow == Overflow::kPromote;
            MEGAPACK_RUN(bucket, rules);
            rules.max_segments = 7;
            MEGAPACK_RUN(bucket, rules);
        }
    }
    MEGAPACK_RUN(decompose, DecomposeRules{{4, 8, 16}});
    std::vector<std::int64_t> second;
    for (std::int64_t i = 0; i < ssize(lengths); ++i) second.push_back(i * i % 7);
    for (const std::int64_t pool_size : {1, 7, 1000})
        for (const std::int64_t max_segments : {0, 7}) {
            BucketRules rules;
            rules.capacities = buckets;
            rules.pool_size = pool_size;
            rules.max_segments = max_segments;
            rules.overflow = max_segments == 0 ? Overflow::kPromote : Overflow::kPad;
            MEGAPACK_RUN(bucket_second, BucketSecondRules{rules, second, {2, 6, 9}});
        }
}

std::vector<std::vector<std::int64_t>> inputs() {
    std::vector<std::vector<std::int64_t>> all{{},
                                               {0},
                                               {1},
                                               {16},
                                               {32, 0, 16},
                                               {5000},
                                               std::vector<std::int64_t>(50, 1),
                                               std::vector<std::int64_t>(40, 9)};
    const Random random(42);
    for (std::uint64_t k = 0; k < 4; ++k) {
        std::vector<std::int64_t> lengths;
        for (std::uint64_t i = 0; i < 150; ++i)
            lengths.push_back(
                static_cast<std::int64_t>(random.child(k).below(i, k % 2 == 0 ? 40 : 400)));
        all.push_back(lengths);
    }
    return all;
}

}  // namespace

int main() {
    for (const auto& lengths : inputs()) {
        const std::vector<std::int32_t> narrow(lengths.begin(), lengths.end());
        run_all<std::int32_t, std::int32_t>(narrow, 16);
#ifndef __SANITIZE_THREAD__  // one width suffices to find data races
        run_all<std::int64_t, std::int32_t>(narrow, 7);
#endif
        run_all<std::int64_t, std::int64_t>(lengths, 1);
    }
    std::puts("ok");
    return 0;
}
