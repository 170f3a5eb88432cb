// Which lengths share a sample: the bucket strategies decided on a histogram of lengths.
//
// A pool is drained bucket by bucket: the smallest bucket that holds the longest document, then the
// largest document that still fits, again and again (BucketLLM, Algorithm 2). Which document of a
// length is taken plays no part in the choice, so that choice is made once for as many samples as
// the histogram can repeat: a plan of some ten thousand patterns, whatever the number of documents.
// Documents of a class are taken in order, so the plan's samples are those of the rule applied
// document by document.
#pragma once

#include <cstdint>
#include <vector>

#include "core/span.hpp"

namespace megapack {

struct BucketRules {
    std::vector<std::int64_t> capacities;  // ascending
    // The longest document goes to a larger bucket if nothing fits beside it in its own.
    bool promote = false;
    // BucketLLM's pair search (Algorithm 2, lines 6 to 12).
    bool pairs = false;
    // Space above this share of the capacity takes the head of the shortest document; 1: never.
    double padding_threshold = 1;
};

// `copies` documents of `length`, from number `rank` of that class on.
struct PatternEntry {
    std::int32_t length, copies;
    std::int64_t rank;
};

// `count` samples of the same lengths; sample i takes entry.rank + i * entry.copies and following.
struct Pattern {
    std::int64_t count;
    std::uint32_t end_entry;  // its entries follow those of the pattern before
    std::int32_t bucket;
    std::int32_t head;  // index of the head that fills the sample, or -1
};

// The first `tokens` tokens of document `rank` of class `length`; the rest of the document becomes
// number `rest_rank` of class `length - tokens`.
struct Head {
    std::int32_t length, tokens;
    std::int64_t rank, rest_rank;
};

struct BucketPlan {
    std::vector<Pattern> patterns;
    std::vector<PatternEntry> entries;
    std::vector<Head> heads;
    std::vector<std::int64_t> samples_in_bucket, segments_in_bucket;

    std::size_t num_bytes() const {
        return patterns.size() * sizeof(Pattern) + entries.size() * sizeof(PatternEntry) +
               heads.size() * sizeof(Head);
    }
};

// Drains a pool. counts[l] documents of length l, for l in [0, largest capacity).
BucketPlan plan_buckets(std::vector<std::int64_t> counts, const BucketRules& rules);

}  // namespace megapack
