// The packing core under the sanitizers: every strategy on random and awkward lengths, all widths,
// one thread and several. What the samples are is checked against the definitions in Python; here
// the laws must hold and nothing may be read or written out of place.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <numeric>
#include <set>
#include <string>

#include "core/index/metrics.hpp"
#include "core/packing/atoms.hpp"
#include "core/packing/bucket.hpp"
#include "core/packing/decompose.hpp"
#include "core/packing/fit_decreasing.hpp"
#include "core/packing/length_set.hpp"
#include "core/packing/next_fit.hpp"
#include "core/packing/order.hpp"
#include "core/packing/seamless.hpp"
#include "core/packing/stream.hpp"

namespace {

using megapack::BucketRules;
using megapack::Lengths;
using megapack::Overflow;
using megapack::Progress;
using megapack::Random;
using megapack::Ratio;
using megapack::Run;
using megapack::Samples;
using megapack::Span;

constexpr std::int64_t kLargest = std::int64_t{1} << 62;

void require(bool ok, const std::string& what) {
    if (ok) return;
    std::printf("failed: %s\n", what.c_str());
    std::exit(1);
}

template <typename Id, typename Length>
using Pack = std::function<Samples<Id, Length>(const Lengths<Length>&, const Run&)>;

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
    const Lengths<Length> checked{Span<const Length>(lengths)};
    const Samples<Id, Length> one = pack(checked, Run(3, 1, silent));
    check_packing(name, one, lengths);
    for (const int threads : {2, 7}) {
        const Samples<Id, Length> other = pack(checked, Run(3, threads, silent));
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
    using Checked = Lengths<Length>;
    const auto in_order = [](const Checked& x) { return megapack::in_file_order<Id>(x); };
    const std::vector<std::int64_t> buckets{capacity, 2 * capacity + 1, 5 * capacity};
    run<Id, Length>(
        "concat",
        [&](const Checked& x, const Run& r) {
            auto documents = in_order(x);
            const auto order = megapack::shuffle<Id>(documents.lengths, Random(7), r.threads);
            documents.items = order.data();
            auto samples = megapack::pack_streams(documents, {capacity}, r);
            megapack::drop_partial_sample(samples);
            return samples;
        },
        lengths);
    run<Id, Length>(
        "bucket_naive",
        [&](const Checked& x, const Run& r) {
            return megapack::pack_streams(in_order(x), buckets, r);
        },
        lengths);
    for (const std::int64_t atom : {std::int64_t{1}, capacity, 3 * capacity}) {
        const megapack::AtomRules rules{capacity, atom};
        run<Id, Length>(
            "pad",
            [&](const Checked& x, const Run& r) {
                return megapack::pack_padded(in_order(x), rules, r);
            },
            lengths);
        run<Id, Length>(
            "concat with atoms",
            [&](const Checked& x, const Run& r) {
                const auto stream = megapack::pack_streams(in_order(x), {rules.unit()}, r);
                return megapack::shuffle_atoms(stream, rules, r);
            },
            lengths);
    }
    run<Id, Length>(
        "next_fit",
        [&](const Checked& x, const Run& r) {
            return megapack::pack_next_fit(in_order(x), capacity, r);
        },
        lengths);
    run<Id, Length>(
        "length_sorted",
        [&](const Checked& x, const Run& r) {
            return megapack::pack_length_sorted(in_order(x), capacity, r);
        },
        lengths);
    for (const std::int64_t extra : {0, 3}) {
        for (const auto fit : {megapack::Fit::kFirst, megapack::Fit::kBest})
            run<Id, Length>(
                "fit_decreasing",
                [&](const Checked& x, const Run& r) {
                    return megapack::pack_fit(in_order(x), capacity, extra, fit, r);
                },
                lengths);
        for (const auto placement : {megapack::Placement::kExact, megapack::Placement::kPaper,
                                     megapack::Placement::kPublished}) {
            const megapack::SeamlessRules rules{capacity, Ratio(2, 5), placement, extra};
            run<Id, Length>(
                "seamless",
                [&](const Checked& x, const Run& r) {
                    return megapack::pack_seamless(in_order(x), rules, r);
                },
                lengths);
        }
    }
    for (const std::int64_t pool_size : {1, 7, 1000}) {
        for (const auto overflow : {Overflow::kPad, Overflow::kHead, Overflow::kPromote}) {
            const bool head = overflow == Overflow::kHead;
            const BucketRules rules{buckets, overflow, Ratio(1, 20), head, head};
            run<Id, Length>(
                "drained buckets",
                [&](const Checked& x, const Run& r) {
                    return megapack::pack_buckets<Id>(x, rules, {}, pool_size, r);
                },
                lengths);
            run<Id, Length>(
                "streamed buckets",
                [&](const Checked& x, const Run& r) {
                    return megapack::pack_bucket_stream<Id>(x, rules, pool_size, r);
                },
                lengths);
        }
    }
    run<Id, Length>(
        "decompose",
        [&](const Checked& x, const Run& r) {
            return megapack::pack_decompose(in_order(x), {4, 8, 16}, r);
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
    const Lengths<std::int32_t> checked{Span<const std::int32_t>(lengths)};
    auto samples = megapack::pack_next_fit(megapack::in_file_order<std::int32_t>(checked), 16,
                                           Run(0, 1, silent));
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
       "segment 1 is [1, +9) of document 1, which has 9 tokens");
    is(fault_of([](Damaged s) { s.segment_length[1] = 0; }),
       "segment 1 is [0, +0) of document 1, which has 9 tokens");
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

// Whatever the arrays of an index hold, they are refused or they keep the laws.
void test_random_damage_is_found() {
    const Random random(9);
    int refused = 0;
    for (std::uint64_t round = 0; round < 3000; ++round) {
        const Random chance = random.child(round);
        constexpr std::int64_t kOdd[] = {-1,
                                         0,
                                         1,
                                         2,
                                         3,
                                         9,
                                         17,
                                         1 << 30,
                                         -(std::int64_t{1} << 62),
                                         std::numeric_limits<std::int64_t>::max()};
        const std::int64_t odd = kOdd[chance.below(0, std::size(kOdd))];
        const auto narrow = static_cast<std::int32_t>(odd);
        const auto which = chance.below(1, 6), at = chance.below(2, 2);
        const std::string fault = fault_of([&](Samples<std::int32_t, std::int32_t>& s) {
            if (which == 0) s.bucket_capacity[0] = odd;
            if (which == 1) s.bucket_sample_offsets[at] = odd;
            if (which == 2) s.sample_segment_offsets[at] = odd;
            if (which == 3) s.segment_document[at] = narrow;
            if (which == 4) s.segment_begin[at] = narrow;
            if (which == 5) s.segment_length[at] = narrow;
        });
        refused += fault.empty() ? 0 : 1;
    }
    require(refused > 2000, "damage was accepted");
}

// The message of what `run` throws as Error.
template <typename Error>
std::string message_of(const std::function<void()>& run) {
    try {
        run();
    } catch (const Error& error) {
        return error.what();
    }
    return "nothing was thrown";
}

void expect(const std::string& message, const std::string& part) {
    require(message.find(part) != std::string::npos, "'" + message + "' should say '" + part + "'");
}

template <typename Length>
std::string refusal_of_lengths(const std::vector<Length>& lengths) {
    return message_of<megapack::DataError>([&] { Lengths<Length>{Span<const Length>(lengths)}; });
}

void test_lengths_are_checked() {
    expect(refusal_of_lengths<std::int32_t>({3, -7}), "document 1 has length -7");
    expect(refusal_of_lengths<std::int64_t>({3, 4, -kLargest}), "document 2 has length -46116860");
    expect(refusal_of_lengths<std::int64_t>({kLargest, kLargest, kLargest, kLargest}),
           "more than 2^62");
    expect(refusal_of_lengths<std::int64_t>({kLargest, 1}), "2 documents have more than 2^62");
    expect(refusal_of_lengths<std::int64_t>({kLargest}), "nothing was thrown");
    expect(message_of<megapack::DataError>([] {
               const std::vector<std::uint64_t> lengths{~std::uint64_t{0}};
               megapack::check_lengths(Span<const std::uint64_t>(lengths));
           }),
           "the longest has 18446744073709551615");
    std::vector<std::int32_t> many(200000, 2147483647);
    many[5] = 0, many[6] = 12;
    const auto totals = megapack::check_lengths(Span<const std::int32_t>(many), 12);
    require(totals.num_tokens == 199998 * std::int64_t{2147483647} + 12 &&
                totals.longest == 2147483647 && totals.num_empty == 1 &&
                totals.num_longer == 199998,
            "totals of lengths");
}

// What the seam lets through as numbers, the strategies refuse as arguments.
void test_wrong_arguments_are_refused() {
    const std::vector<std::int32_t> lengths{5, 9, 40};
    const Lengths<std::int32_t> checked{Span<const std::int32_t>(lengths)};
    const auto documents = megapack::in_file_order<std::int32_t>(checked);
    Progress silent;
    const Run run(0, 2, silent);
    const auto refusal = [](const std::function<void()>& call, const std::string& part) {
        expect(message_of<std::invalid_argument>(call), part);
    };
    refusal([&] { Run(0, 0, silent); }, "threads is 0; it must be from 1");
    refusal([&] { Run(0, std::int64_t{1} << 40, silent); }, "threads is 1099511627776");
    refusal([&] { megapack::pack_streams(documents, {}, run); }, "there are no buckets");
    refusal([&] { megapack::pack_streams(documents, {8, 8}, run); }, "8 follows 8");
    for (const std::int64_t capacity : {std::int64_t{0}, std::int64_t{-3}, std::int64_t{1} << 40}) {
        const std::string part = "a capacity is " + std::to_string(capacity);
        refusal([&] { megapack::pack_streams(documents, {capacity}, run); }, part);
        refusal([&] { megapack::pack_next_fit(documents, capacity, run); }, part);
        refusal([&] { megapack::pack_length_sorted(documents, capacity, run); }, part);
        refusal([&] { megapack::pack_fit(documents, capacity, 0, megapack::Fit::kBest, run); },
                part);
        const megapack::SeamlessRules seamless{capacity, {}, megapack::Placement::kExact, 0};
        refusal([&] { megapack::pack_seamless(documents, seamless, run); }, part);
        refusal([&] { megapack::pack_padded(documents, {capacity, 1}, run); }, part);
        BucketRules rules;
        rules.capacities = {capacity};
        refusal([&] { megapack::pack_buckets<std::int32_t>(checked, rules, {}, 9, run); }, part);
        refusal([&] { megapack::count_bucket_samples({0, 1}, rules); }, part);
    }
    refusal([&] { megapack::pack_padded(documents, {8, 3}, run); }, "one must be a multiple");
    refusal([&] { megapack::pack_padded(documents, {8, 0}, run); }, "atom_size is 0");
    refusal([&] { megapack::pack_fit(documents, 8, -1, megapack::Fit::kBest, run); },
            "extra_capacity is -1");
    refusal([&] { megapack::pack_decompose(documents, {4, 16}, run); }, "bucket 16 follows 4");
    refusal([&] { megapack::pack_decompose(documents, {6, 12}, run); }, "6 is no power of two");
    refusal([&] { Ratio(3, 2); }, "3 / 2 is no share");
    refusal([&] { Ratio(0, 0); }, "0 / 0 is no share");
    BucketRules rules;
    rules.capacities = {8, 16};
    refusal([&] { megapack::pack_buckets<std::int32_t>(checked, rules, {}, 0, run); },
            "pool_size is 0");
    refusal([&] { megapack::count_bucket_samples({0, -1}, rules); }, "-1 documents of length 1");
    refusal([&] { megapack::count_bucket_samples({0, std::int64_t{1} << 62, 1}, rules); }, "2^62");
    const auto given = [&](megapack::GivenPattern pattern) {
        return [&, pattern] {
            megapack::pack_buckets<std::int32_t>(checked, rules, {pattern}, 9, run);
        };
    };
    refusal(given({2, 1, {{5, 1}}}), "bucket 2 of 2");
    refusal(given({0, 1, {{5, 2}}}), "2 documents of length 5");
    refusal(given({1, 1, {{5, 2}}}), "1 times 2 documents of length 5; there are 1");
    refusal(given({1, 1, {{5, 1}, {5, 1}}}), "1 times 2 documents of length 5; there are 1");
    refusal(given({1, 1, {{9, 2147483647}, {9, 2147483647}}}), "room for 16");
    require(
        message_of<std::invalid_argument>(given({1, 1, {{9, 1}, {5, 1}}})) == "nothing was thrown",
        "a sound pattern is taken");
}

// 3 tenths of 1000 are 300 tokens, whatever 0.3 is in binary.
void test_shares_do_not_round() {
    const Ratio tenth(1, 10), most(1, 1), odd(333333333333333333, 1000000000000000000);
    require(!tenth.exceeded_by(100, 1000) && tenth.exceeded_by(101, 1000), "0.1 of 1000");
    require(tenth.rounded_up_holds(300, 3000) && !tenth.rounded_up_holds(301, 3000), "3 tenths");
    require(tenth.rounded_up_holds(1, 5) && !tenth.rounded_up_holds(2, 5), "ceil of a half");
    require(tenth.rounded_up_holds(0, 0) && !tenth.rounded_up_holds(1, 0), "of nothing");
    require(most.floor_of(kLargest) == kLargest && odd.floor_of(kLargest) < kLargest / 3,
            "no overflow");
}

}  // namespace

int main() {
    test_length_set();
    test_faults_are_found();
    test_random_damage_is_found();
    test_lengths_are_checked();
    test_wrong_arguments_are_refused();
    test_shares_do_not_round();
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
