// The order of buckets inside one cycle of the schedule, any draw of which is located by itself.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/span.hpp"

namespace megapack {

// Bucket b is drawn counts[b] times; its t-th draw happens at time (t + u) / (counts[b] * odds[b])
// with u uniform in [0, 1) of its own, and the cycle is all draws in order of time (ties: smaller
// bucket). With equal odds every bucket is spread evenly over the whole cycle, so that any window
// holds the buckets in proportion; with odds o a bucket is exhausted after a share 1/o of the time
// of one with odds 1, which is sampling with odds o without replacement (Dataset Decomposition,
// arXiv 2405.13226, section 2.3) with the variance of independent draws removed.
//
// As a bucket's t-th draw falls into the t-th of counts[b] equal parts of its time, the draws
// before a time are counted without looking at them. So the state at any position of the cycle is
// found by halving time: O(buckets), with nothing kept per draw.
class CycleOrder {
  public:
    enum class Times {
        kSpread,       // as above
        kRandom,       // all draws in random order: u alone is the time; sorted at the beginning
        kConsecutive,  // bucket after bucket
    };

    // largest_first: the first draw of the last bucket changes places with position 0.
    CycleOrder(Span<const std::int64_t> counts, Span<const double> odds, std::uint64_t key,
               Times times, bool largest_first);

    std::int64_t size() const { return size_; }

    // How often every bucket is drawn at positions [0, end), 0 <= end <= size().
    std::vector<std::int64_t> counts(std::int64_t end) const;
    // The bucket of positions [begin, end).
    std::vector<std::int32_t> range(std::int64_t begin, std::int64_t end) const;
    // The draw at a position: its bucket, and how often that one is drawn before.
    struct Draw {
        std::int64_t bucket;
        std::int64_t rank;
    };
    Draw at(std::int64_t position) const;
    // The inverse.
    std::int64_t position(std::int64_t bucket, std::int64_t rank) const;

  private:
    struct Bucket {
        std::int64_t count;
        std::uint64_t key;
        double begin;               // of its time
        double rate;                // draws per unit of time
        std::vector<double> drawn;  // times of all draws, ascending; only where they are random
    };
    class Merge;

    double time(const Bucket& bucket, std::int64_t rank) const;
    // Draws of a bucket before a time, or until it with those that happen at it.
    std::int64_t draws_before(const Bucket& bucket, double time, bool inclusive) const;
    // As if no draws had changed places; the next two say what that changes.
    std::int64_t unswapped_position(std::int64_t bucket, std::int64_t rank) const;
    std::int64_t swapped_bucket(std::int64_t position, std::int64_t bucket) const;
    std::vector<std::int64_t> swapped_counts(std::vector<std::int64_t> counts,
                                             std::int64_t end) const;

    std::vector<Bucket> buckets_;
    std::int64_t size_ = 0;
    std::int64_t first_ = 0;       // the bucket of position 0 before it changed places
    std::int64_t largest_ = 0;     // the bucket that stands there now
    std::int64_t swapped_at_ = 0;  // where first_ went
};

}  // namespace megapack
