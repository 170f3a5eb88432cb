// First-fit and best-fit decreasing on a histogram of lengths.
//
// Lengths are taken from long to short. Bins with the same contents form a run of consecutive bins;
// documents of one length fill a run at once, k = space / length to each bin, because after the
// first of them the same bin is again the first (and the best) that fits. A run is split where the
// documents of a length end in its middle, so there are at most a few runs per distinct length,
// whatever the number of documents, and their bins are those of the rule applied one by one.
#pragma once

#include <cstdint>
#include <vector>

namespace megapack {

enum class Fit { kFirst, kBest };

// Every bin of some run took `copies` documents of `length`: bin b has the numbers
// base + b * copies and following of that class. `before` is the entry before it, or -1.
struct FitEntry {
    std::int32_t length, copies;
    std::int64_t base;
    std::int32_t before;
};

// Bins [first_bin, first_bin + count) have the same contents.
struct FitRun {
    std::int64_t first_bin, count;
    std::int64_t space;
    std::int32_t last_entry;  // their contents, last first
};

struct FitPlan {
    std::vector<FitRun> runs;  // by first_bin
    std::vector<FitEntry> entries;

    std::int64_t num_bins() const {
        return runs.empty() ? 0 : runs.back().first_bin + runs.back().count;
    }
};

// counts[l] documents of length l, for l in [0, counts.size()); counts.size() - 1 <= capacity.
// First fit takes the bin opened first among those that fit; best fit the one with the least space,
// among equals the one that reached that space first.
FitPlan plan_fit(const std::vector<std::int64_t>& counts, std::int64_t capacity, Fit fit);

}  // namespace megapack
