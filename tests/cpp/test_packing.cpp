// Basics of packing under the sanitizers: sets of lengths, checks of lengths, exact shares,
// arguments that strategies refuse, damaged arrays of an index.
#include <functional>
#include <iterator>
#include <set>

#include "core/base/random.hpp"
#include "core/index/metrics.hpp"
#include "core/packing/bucket_plan.hpp"
#include "packing.hpp"

namespace {

using namespace megapack;

constexpr std::int64_t kLargest = std::int64_t{1} << 62;

void test_length_set() {
    for (const std::int64_t limit : {0, 1, 63, 64, 4095, 4096, 300000}) {
        LengthSet set(limit);
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

void expect(const std::string& message, const std::string& part) {
    require(message.find(part) != std::string::npos, "'" + message + "' should say '" + part + "'");
}

template <typename Length>
std::string refusal_of_lengths(const std::vector<Length>& lengths) {
    return message_of<DataError>([&] { Lengths<Length>{Span<const Length>(lengths)}; });
}

void test_lengths_are_checked() {
    expect(refusal_of_lengths<std::int32_t>({3, -7}), "document 1 has length -7");
    expect(refusal_of_lengths<std::int64_t>({3, 4, -kLargest}), "document 2 has length -46116860");
    expect(refusal_of_lengths<std::int64_t>({kLargest, kLargest, kLargest, kLargest}),
           "more than 2^62");
    expect(refusal_of_lengths<std::int64_t>({kLargest, 1}), "2 documents have more than 2^62");
    expect(refusal_of_lengths<std::int64_t>({kLargest}), "nothing was thrown");
    expect(message_of<DataError>([] {
               const std::vector<std::uint64_t> lengths{~std::uint64_t{0}};
               check_lengths(Span<const std::uint64_t>(lengths));
           }),
           "the longest has 18446744073709551615");
    std::vector<std::int32_t> many(200000, 2147483647);
    many[5] = 0, many[6] = 12;
    const auto totals = check_lengths(Span<const std::int32_t>(many), 12);
    require(totals.num_tokens == 199998 * std::int64_t{2147483647} + 12 &&
                totals.longest == 2147483647 && totals.num_empty == 1 &&
                totals.num_longer == 199998,
            "totals of lengths");
}

// Strategies refuse numbers that the bindings accept.
void test_wrong_arguments_are_refused() {
    const std::vector<std::int32_t> lengths{5, 9, 40};
    const Lengths<std::int32_t> checked{Span<const std::int32_t>(lengths)};
    // Calls pack_<name> with these rules and the documents above.
#define MEGAPACK_PACK(name, ...) [&] { pack_##name<std::int32_t>(checked, __VA_ARGS__, run); }
    Progress silent;
    const Run run(0, 2, silent);
    const auto refusal = [](const std::function<void()>& call, const std::string& part) {
        expect(message_of<std::invalid_argument>(call), part);
    };
    refusal([&] { Run(0, 0, silent); }, "threads is 0; it must be from 1");
    refusal([&] { Run(0, std::int64_t{1} << 40, silent); }, "threads is 1099511627776");
    refusal(MEGAPACK_PACK(bucket_naive, BucketNaiveRules{}), "there are no buckets");
    refusal(MEGAPACK_PACK(bucket_naive, BucketNaiveRules{{8, 8}}), "8 follows 8");
    for (const std::int64_t capacity : {std::int64_t{0}, std::int64_t{-3}, std::int64_t{1} << 40}) {
        const std::string part = "a capacity is " + std::to_string(capacity);
        refusal(MEGAPACK_PACK(bucket_naive, BucketNaiveRules{{capacity}}), part);
        refusal(MEGAPACK_PACK(concat, ConcatRules{{capacity, 1}}), part);
        refusal(MEGAPACK_PACK(next_fit, NextFitRules{capacity}), part);
        refusal(MEGAPACK_PACK(length_sorted, LengthSortedRules{capacity}), part);
        refusal(MEGAPACK_PACK(fit_decreasing, FitRules{capacity}), part);
        refusal(MEGAPACK_PACK(seamless, SeamlessRules{capacity, {}, Placement::kExact}), part);
        refusal(MEGAPACK_PACK(pad, PadRules{{capacity, 1}}), part);
        BucketRules rules;
        rules.capacities = {capacity};
        refusal(MEGAPACK_PACK(bucket, rules), part);
        refusal([&] { count_bucket_samples({0, 1}, rules); }, part);
    }
    refusal(MEGAPACK_PACK(pad, PadRules{{8, 3}}), "one must be a multiple");
    refusal(MEGAPACK_PACK(pad, PadRules{{8, 0}}), "atom_size is 0");
    refusal(MEGAPACK_PACK(fit_decreasing, FitRules{8, -1}), "extra_capacity is -1");
    refusal(MEGAPACK_PACK(decompose, DecomposeRules{{4, 16}}), "bucket 16 follows 4");
    refusal(MEGAPACK_PACK(decompose, DecomposeRules{{6, 12}}), "6 is not a power of two");
    refusal([&] { Ratio(3, 2); }, "3 / 2 is not a share");
    refusal([&] { Ratio(0, 0); }, "0 / 0 is not a share");
    BucketRules rules;
    rules.capacities = {8, 16};
    rules.pool_size = 0;
    refusal(MEGAPACK_PACK(bucket, rules), "pool_size is 0");
    refusal(MEGAPACK_PACK(bucket_stream, rules), "pool_size is 0");
    rules.pool_size = 9;
    refusal([&] { count_bucket_samples({0, -1}, rules); }, "-1 documents of length 1");
    refusal([&] { count_bucket_samples({0, std::int64_t{1} << 62, 1}, rules); }, "2^62");
    const auto given = [&](GivenPattern pattern) {
        rules.given = {pattern};
        return MEGAPACK_PACK(bucket, rules);
    };
    refusal(given({2, 1, {{5, 1}}}), "bucket 2 of 2");
    refusal(given({0, 1, {{5, 2}}}), "2 documents of length 5");
    refusal(given({1, 1, {{5, 2}}}), "1 times 2 documents of length 5; there are 1");
    refusal(given({1, 1, {{5, 1}, {5, 1}}}), "1 times 2 documents of length 5; there are 1");
    refusal(given({1, 1, {{9, 2147483647}, {9, 2147483647}}}), "room for 16");
    require(
        message_of<std::invalid_argument>(given({1, 1, {{9, 1}, {5, 1}}})) == "nothing was thrown",
        "a valid pattern");
}

// 3 tenths of 1000 are exactly 300 tokens, although no binary number equals 0.3.
void test_shares_do_not_round() {
    const Ratio tenth(1, 10), most(1, 1), odd(333333333333333333, 1000000000000000000);
    require(!tenth.exceeded_by(100, 1000) && tenth.exceeded_by(101, 1000), "0.1 of 1000");
    require(tenth.rounded_up_holds(300, 3000) && !tenth.rounded_up_holds(301, 3000), "3 tenths");
    require(tenth.rounded_up_holds(1, 5) && !tenth.rounded_up_holds(2, 5), "ceil of a half");
    require(tenth.rounded_up_holds(0, 0) && !tenth.rounded_up_holds(1, 0), "of nothing");
    require(most.floor_of(kLargest) == kLargest && odd.floor_of(kLargest) < kLargest / 3,
            "no overflow");
}

// ---- Damaged arrays of an index

// Returns the error of a damaged index. The sanitizer finds reads outside the arrays.
std::string fault_of(const std::function<void(Samples<std::int32_t, std::int32_t>&)>& damage) {
    const std::vector<std::int32_t> lengths{5, 9};
    Progress silent;
    const Lengths<std::int32_t> checked{Span<const std::int32_t>(lengths)};
    auto samples = pack_next_fit<std::int32_t>(checked, NextFitRules{16}, Run(0, 1, silent));
    damage(samples);
    const std::vector<std::int64_t> capacity{16};
    const Integers documents{Span<const std::int32_t>(lengths)};
    return message_of<FormatError>([&] { check_laws(view_of(samples), capacity, documents); });
}

void test_faults_are_found() {
    using Damaged = Samples<std::int32_t, std::int32_t>&;
    const std::pair<std::function<void(Damaged)>, std::string> faults[] = {
        {[](Damaged) {}, "nothing was thrown"},
        {[](Damaged s) { s.segment_document[0] = 2; }, "segment 0 names document 2 of 2"},
        {[](Damaged s) { s.segment_document[0] = -1; }, "segment 0 names document -1 of 2"},
        {[](Damaged s) { s.segment_begin[1] = 1; },
         "segment 1 is [1, +9) of document 1, which has 9 tokens"},
        {[](Damaged s) { s.segment_length[1] = 0; },
         "segment 1 is [0, +0) of document 1, which has 9 tokens"},
        {[](Damaged s) { s.segment_document[0] = 1, s.segment_length[0] = 8; },
         "sample 0 holds 17 tokens; its capacity is 16"},
        {[](Damaged s) { s.sample_segment_offsets[0] = -1; },
         "sample 0 claims segments -1 to 2 of 2"},
        {[](Damaged s) { s.sample_segment_offsets[1] = 7; },
         "sample 0 claims segments 0 to 7 of 2"},
        {[](Damaged s) { s.bucket_sample_offsets[1] = 9; }, "bucket 0 claims samples 0 to 9 of 1"},
    };
    for (const auto& [damage, expected] : faults) {
        const std::string fault = fault_of(damage);
        require(fault == expected, "'" + fault + "' should be '" + expected + "'");
    }
}

// check_laws refuses random numbers in the arrays, or the index still keeps the laws.
void test_random_damage_is_found() {
    const Random random(9);
    int refused = 0;
    for (std::uint64_t round = 0; round < 3000; ++round) {
        const Random chance = random.child(round);
        constexpr std::int64_t kHuge = std::int64_t{1} << 62;
        constexpr std::int64_t kOdd[] = {-1, 0, 1, 2, 3, 9, 17, 1 << 30, -kHuge, kHuge - 1 + kHuge};
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
        refused += fault == "nothing was thrown" ? 0 : 1;
    }
    require(refused > 2000, "damage was accepted");
}

}  // namespace

int main() {
    return pass({test_length_set, test_lengths_are_checked, test_wrong_arguments_are_refused,
                 test_shares_do_not_round, test_faults_are_found, test_random_damage_is_found});
}
