// Order of the buckets in a cycle of the schedule; any draw is found without computing the others.
//
//     counts {2, 4}, equal odds  ->  for example 1 0 1 1 0 1
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/span.hpp"

namespace megapack {

// Bucket b is drawn counts[b] times; its t-th draw happens at time (t + u) / (counts[b] * odds[b])
// with u uniform in [0, 1), and the cycle is all draws in order of time (ties: smaller bucket).
// With equal odds every bucket is spread evenly over the cycle, so any window has the buckets in
// proportion. A bucket with odds o is exhausted after 1/o of the time of one with odds 1: sampling
// with odds o without replacement (Dataset Decomposition, arXiv 2405.13226, section 2.3), without
// the variance of independent draws.
//
// The t-th draw of a bucket is in the t-th of counts[b] equal parts of its time, so the draws
// before a time are counted in closed form. Bisection over time finds the state at any position in
// O(buckets), with no memory per draw.
class CycleOrder {
  public:
    enum class Times {
        kSpread,       // as above
        kRandom,       // all draws in random order: u is the time; sorted by the constructor
        kConsecutive,  // bucket after bucket
    };

    // largest_first: exchanges the first draw of the last bucket with position 0.
    CycleOrder(Span<const std::int64_t> counts, Span<const double> odds, std::uint64_t key,
               Times times, bool largest_first);

    std::int64_t size() const { return size_; }

    // Returns how often every bucket is drawn at positions [0, end), 0 <= end <= size().
    std::vector<std::int64_t> counts(std::int64_t end) const;
    // Returns the buckets of positions [begin, end).
    std::vector<std::int32_t> range(std::int64_t begin, std::int64_t end) const;
    // The draw at a position: its bucket, and how often that bucket was drawn before.
    struct Draw {
        std::int64_t bucket;
        std::int64_t rank;
    };
    Draw at(std::int64_t position) const;
    // Returns the position of a draw.
    std::int64_t position(std::int64_t bucket, std::int64_t rank) const;

  private:
    struct Bucket {
        std::int64_t count;
        std::uint64_t key;
        double begin;               // start of its time
        double rate;                // draws per unit of time
        std::vector<double> drawn;  // kRandom: times of all draws, ascending
    };
    class Merge;

    double time(const Bucket& bucket, std::int64_t rank) const;
    // Counts the draws of a bucket before a time; inclusive: also those at that time.
    std::int64_t draws_before(const Bucket& bucket, double time, bool inclusive) const;
    // Position before the exchange of largest_first; the next two apply the exchange.
    std::int64_t unswapped_position(std::int64_t bucket, std::int64_t rank) const;
    std::int64_t swapped_bucket(std::int64_t position, std::int64_t bucket) const;
    std::vector<std::int64_t> swapped_counts(std::vector<std::int64_t> counts,
                                             std::int64_t end) const;

    std::vector<Bucket> buckets_;
    std::int64_t size_ = 0;
    std::int64_t first_ = 0;       // bucket of position 0 before the exchange
    std::int64_t largest_ = 0;     // bucket of position 0 after it
    std::int64_t swapped_at_ = 0;  // position of first_ after it
};

}  // namespace megapack
