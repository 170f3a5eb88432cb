// The packing core under the sanitizers: every strategy on random and awkward lengths, all widths,
// one thread and several. What the samples are is checked against the definitions in Python; here
// the laws must hold and nothing may be read or written out of place.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <set>
#include <string>

#include "core/length_set.hpp"
#include "core/packing_atoms.hpp"
#include "core/packing_bucket.hpp"
#include "core/packing_decompose.hpp"
#include "core/packing_fit.hpp"
#include "core/packing_metrics.hpp"
#include "core/packing_next_fit.hpp"
#include "core/packing_order.hpp"
#include "core/packing_seamless.hpp"
#include "core/packing_stream.hpp"

namespace {

using megapack::BucketRules;
using megapack::Overflow;
using megapack::Progress;
using megapack::Random;
using megapack::Samples;
using megapack::Span;

void require(bool ok, const std::string& what) {
    if (ok) return;
    std::printf("failed: %s\n", what.c_str());
    std::exit(1);
}

template <typename Id, typename Length>
using Pack = std::function<Samples<Id, Length>(Span<const Length>, int threads, Progress&)>;

template <typename Id, typename Length>
megapack::SampleView<Id, Length> view_of(const Samples<Id, Length>& samples) {
    return {samples.bucket_sample_offsets, samples.sample_segment_offsets, samples.segment_document,
            samples.segment_begin, samples.segment_length};
}

template <typename Id, typename Length>
void check_packing(const std::string& name, const Samples<Id, Length>& samples,
                   const std::vector<Length>& lengths) {
    const auto view = view_of(samples);
    megapack::check_laws<Id, Length>(view, samples.bucket_capacity, lengths);
    const auto totals =
        megapack::measure<Id, Length>(view, static_cast<std::int64_t>(lengths.size()));
    const auto placed = std::accumulate(totals.tokens_per_bucket.begin(),
                                        totals.tokens_per_bucket.end(), std::int64_t{0});
    const auto tokens = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
    require(tokens == placed - samples.repeated_tokens + samples.dropped_tokens,
            name + ": tokens are unaccounted for");
    const auto labels = megapack::label_tokens<Id, Length>(view, lengths);
    require(std::accumulate(labels.begin(), labels.end(), std::int64_t{0}) <= placed,
            name + ": more labels than tokens");
    const auto costs =
        megapack::attention_cost(samples.sample_segment_offsets, samples.segment_length);
    require(std::accumulate(costs.begin(), costs.end(), std::int64_t{0}) == totals.segment_squares,
            name + ": attention cost");
}

template <typename T>
bool equal(const megapack::Buffer<T>& a, const megapack::Buffer<T>& b) {
    return a.size() == b.size() && std::equal(a.data(), a.data() + a.size(), b.data());
}

template <typename Id, typename Length>
void run(const std::string& name, const Pack<Id, Length>& pack,
         const std::vector<Length>& lengths) {
    Progress silent;
    const Samples<Id, Length> one = pack(lengths, 1, silent);
    check_packing(name, one, lengths);
    for (const int threads : {2, 7}) {
        const Samples<Id, Length> other = pack(lengths, threads, silent);
        require(one.bucket_sample_offsets == other.bucket_sample_offsets &&
                    equal(one.sample_segment_offsets, other.sample_segment_offsets) &&
                    equal(one.segment_document, other.segment_document) &&
                    equal(one.segment_begin, other.segment_begin) &&
                    equal(one.segment_length, other.segment_length),
                name + ": depends on the number of threads");
    }
}

template <typename Id, typename Length>
void run_all(const std::vector<Length>& lengths, std::int64_t capacity) {
    using Lengths = Span<const Length>;
    const auto in_order = [](Lengths x) { return megapack::in_file_order<Id>(x); };
    const std::vector<std::int64_t> buckets{capacity, 2 * capacity + 1, 5 * capacity};
    run<Id, Length>(
        "concat",
        [&](Lengths x, int threads, Progress& p) {
            const auto order = megapack::shuffle<Id>(x, Random(7), threads);
            const megapack::Documents<Id, Length> documents{x, order.data(), order.size()};
            auto samples = megapack::pack_streams(documents, {capacity}, threads, p);
            megapack::drop_partial_sample(samples);
            return samples;
        },
        lengths);
    run<Id, Length>(
        "bucket_naive",
        [&](Lengths x, int threads, Progress& p) {
            return megapack::pack_streams(in_order(x), buckets, threads, p);
        },
        lengths);
    for (const std::int64_t atom : {std::int64_t{1}, capacity, 3 * capacity}) {
        const megapack::AtomRules rules{capacity, atom, 5};
        run<Id, Length>(
            "pad",
            [&](Lengths x, int threads, Progress& p) {
                return megapack::pack_padded(in_order(x), rules, threads, p);
            },
            lengths);
        run<Id, Length>(
            "concat with atoms",
            [&](Lengths x, int threads, Progress& p) {
                const auto stream = megapack::pack_streams(in_order(x), {rules.unit()}, threads, p);
                return megapack::shuffle_atoms(stream, rules, threads);
            },
            lengths);
    }
    run<Id, Length>(
        "next_fit",
        [&](Lengths x, int, Progress& p) {
            return megapack::pack_next_fit(in_order(x), capacity, p);
        },
        lengths);
    run<Id, Length>(
        "length_sorted",
        [&](Lengths x, int threads, Progress& p) {
            return megapack::pack_length_sorted(in_order(x), capacity, threads, p);
        },
        lengths);
    for (const std::int64_t extra : {0, 3}) {
        for (const auto fit : {megapack::Fit::kFirst, megapack::Fit::kBest})
            run<Id, Length>(
                "fit_decreasing",
                [&](Lengths x, int threads, Progress& p) {
                    return megapack::pack_fit(in_order(x), capacity, extra, fit, threads, p);
                },
                lengths);
        for (const auto placement : {megapack::Placement::kExact, megapack::Placement::kPaper,
                                     megapack::Placement::kPublished}) {
            const megapack::SeamlessRules rules{capacity, 0.4, placement, extra};
            run<Id, Length>(
                "seamless",
                [&](Lengths x, int threads, Progress& p) {
                    return megapack::pack_seamless(in_order(x), rules, threads, p);
                },
                lengths);
        }
    }
    for (const std::int64_t pool_size : {1, 7, 1000}) {
        for (const auto overflow : {Overflow::kPad, Overflow::kHead, Overflow::kPromote}) {
            const bool head = overflow == Overflow::kHead;
            const BucketRules rules{buckets, overflow, 0.05, head, head};
            run<Id, Length>(
                "drained buckets",
                [&](Lengths x, int threads, Progress& p) {
                    return megapack::pack_buckets<Id, Length>(x, rules, {}, pool_size, 3, threads,
                                                              p);
                },
                lengths);
            run<Id, Length>(
                "streamed buckets",
                [&](Lengths x, int threads, Progress& p) {
                    return megapack::pack_bucket_stream<Id, Length>(x, rules, pool_size, 3, threads,
                                                                    p);
                },
                lengths);
        }
    }
    run<Id, Length>(
        "decompose",
        [&](Lengths x, int threads, Progress& p) {
            return megapack::pack_decompose(in_order(x), {4, 8, 16}, threads, p);
        },
        lengths);
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
    for (std::uint64_t k = 0; k < 6; ++k) {
        std::vector<std::int64_t> lengths;
        for (std::uint64_t i = 0; i < 200; ++i)
            lengths.push_back(
                static_cast<std::int64_t>(random.child(k).below(i, k % 2 == 0 ? 40 : 400)));
        all.push_back(lengths);
    }
    return all;
}

void test_length_set() {
    for (const std::int64_t limit : {0, 1, 63, 64, 4095, 4096, 300000}) {
        megapack::LengthSet set(limit);
        std::set<std::int64_t> reference;
        const auto n = static_cast<std::uint64_t>(limit) + 1;
        for (std::uint64_t i = 0; i < 400; ++i) {
            const auto x = static_cast<std::int64_t>(Random(1).below(i, n));
            if (Random(2).below(i, 3) == 0) {
                set.erase(x);
                reference.erase(x);
            } else {
                set.insert(x);
                reference.insert(x);
            }
            const auto q = static_cast<std::int64_t>(Random(3).below(i, n));
            const auto above = reference.lower_bound(q);
            const auto after = reference.upper_bound(q);
            require(set.at_least(q) == (above == reference.end() ? -1 : *above), "at_least");
            require(set.at_most(q) == (after == reference.begin() ? -1 : *std::prev(after)),
                    "at_most");
            require(set.empty() == reference.empty(), "empty");
        }
    }
}

// What a damaged index says of itself; no array is read out of place.
std::string fault_of(const std::function<void(Samples<std::int32_t, std::int32_t>&)>& damage) {
    const std::vector<std::int32_t> lengths{5, 9};
    Progress silent;
    const auto documents = megapack::in_file_order<std::int32_t>(Span<const std::int32_t>(lengths));
    auto samples = megapack::pack_next_fit(documents, 16, silent);
    damage(samples);
    const std::vector<std::int64_t> capacity{16};
    try {
        megapack::check_laws<std::int32_t, std::int32_t>(view_of(samples), capacity, lengths);
    } catch (const megapack::FormatError& error) {
        return error.what();
    }
    return "";
}

void test_faults_are_found() {
    using Damaged = Samples<std::int32_t, std::int32_t>&;
    const auto is = [](const std::string& fault, const std::string& expected) {
        require(fault == expected, "'" + fault + "' should be '" + expected + "'");
    };
    is(fault_of([](Damaged) {}), "");
    is(fault_of([](Damaged s) { s.segment_document[0] = 2; }), "segment 0 names document 2 of 2");
    is(fault_of([](Damaged s) { s.segment_document[0] = -1; }), "segment 0 names document -1 of 2");
    is(fault_of([](Damaged s) { s.segment_begin[1] = 1; }),
       "segment 1 is [1, 10) of document 1, which has 9 tokens");
    is(fault_of([](Damaged s) { s.segment_length[1] = 0; }),
       "segment 1 is [0, 0) of document 1, which has 9 tokens");
    is(fault_of([](Damaged s) {
           s.segment_document[0] = 1;
           s.segment_length[0] = 8;
       }),
       "sample 0 holds 17 tokens; its capacity is 16");
    is(fault_of([](Damaged s) { s.sample_segment_offsets[0] = -1; }),
       "sample 0 claims segments -1 to 2 of 2");
    is(fault_of([](Damaged s) { s.sample_segment_offsets[1] = 7; }),
       "sample 0 claims segments 0 to 7 of 2");
    is(fault_of([](Damaged s) { s.bucket_sample_offsets[1] = 9; }),
       "bucket 0 claims samples 0 to 9 of 1");
}

void test_an_exception_in_a_task_arrives() {
    for (const int threads : {1, 4}) {
        bool arrived = false;
        try {
            megapack::parallel_for(threads, 100, [](std::size_t i) {
                if (i == 5) throw std::runtime_error("five");
            });
        } catch (const std::runtime_error&) {
            arrived = true;
        }
        require(arrived, "the exception of a task is thrown to the caller");
    }
}

}  // namespace

int main() {
    test_length_set();
    test_faults_are_found();
    test_an_exception_in_a_task_arrives();
    for (const auto& lengths : inputs()) {
        const std::vector<std::int32_t> narrow(lengths.begin(), lengths.end());
        run_all<std::int32_t, std::int32_t>(narrow, 16);
        run_all<std::int64_t, std::int32_t>(narrow, 7);
        run_all<std::int64_t, std::int64_t>(lengths, 1);
        run_all<std::int64_t, std::int64_t>(lengths, 16);
    }
    std::puts("ok");
    return 0;
}
