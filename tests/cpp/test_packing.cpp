// What packing stands on, under the sanitizers: sets of lengths, checked lengths, exact shares; and
// what the seam lets through as numbers, the strategies refuse as arguments.
#include <functional>
#include <set>

#include "core/base/random.hpp"
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

// What the seam lets through as numbers, the strategies refuse as arguments.
void test_wrong_arguments_are_refused() {
    const std::vector<std::int32_t> lengths{5, 9, 40};
    const Lengths<std::int32_t> checked{Span<const std::int32_t>(lengths)};
    // pack_<name> by these rules, with the documents above.
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
    refusal(MEGAPACK_PACK(decompose, DecomposeRules{{6, 12}}), "6 is no power of two");
    refusal([&] { Ratio(3, 2); }, "3 / 2 is no share");
    refusal([&] { Ratio(0, 0); }, "0 / 0 is no share");
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
    test_lengths_are_checked();
    test_wrong_arguments_are_refused();
    test_shares_do_not_round();
    std::puts("ok");
    return 0;
}
