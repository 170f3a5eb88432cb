// The arrays of an index under the sanitizers: whatever they hold is refused or keeps the laws.
#include <functional>
#include <iterator>
#include <vector>

#include "core/base/random.hpp"
#include "core/index/metrics.hpp"
#include "core/packing/strategy.hpp"
#include "packing.hpp"

namespace {

using namespace megapack;

// What a damaged index says of itself; no array is read out of place.
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
    for (const auto& [damage, wanted] : faults) {
        const std::string found = fault_of(damage);
        require(found == wanted, "'" + found + "' should be '" + wanted + "'");
    }
}

// Whatever the arrays of an index hold, they are refused or they keep the laws.
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
    test_faults_are_found();
    test_random_damage_is_found();
    std::puts("ok");
    return 0;
}
