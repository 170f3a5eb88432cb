// Which lengths share a sample: the bucket strategies decided on a histogram of lengths.
//
// A pool is drained bucket by bucket: the smallest bucket that holds the longest document, then the
// largest document that still fits, again and again (BucketLLM, Algorithm 2). Which document of a
// length is taken plays no part in the choice, so that choice is made once for as many samples as
// the histogram can repeat: a plan of some ten thousand patterns, whatever the number of documents.
// Documents of a class are taken in order, so the plan's samples are those of the rule applied
// document by document.
#pragma once

#include <vector>

#include "core/packing/length_set.hpp"
#include "core/packing/strategy.hpp"

namespace megapack {

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

    // Keeps the numbers alone. (`= {}` would empty the vectors and keep their memory.)
    void forget_samples() {
        patterns = std::vector<Pattern>();
        entries = std::vector<PatternEntry>();
        heads = std::vector<Head>();
    }
    std::int64_t num_bytes() const {
        return patterns.size() * sizeof(Pattern) + entries.size() * sizeof(PatternEntry) +
               heads.size() * sizeof(Head);
    }
};

// Decides one pattern after the other. Documents of a class are taken in the order in which they
// came: first those the planner was made with, then those added.
class BucketPlanner {
  public:
    // counts[l] documents of length l; none longer than counts.size() - 1, which is at most the
    // largest capacity, comes later.
    BucketPlanner(std::vector<std::int64_t> counts, const BucketRules& rules);

    void add(std::int64_t length);
    bool empty() const { return present_.empty(); }
    std::int64_t longest() const { return present_.largest(); }

    // Appends the next pattern to the plan, at most `max_repeats` samples of it.
    void next(std::int64_t max_repeats);

    // Appends a pattern decided elsewhere. Throws if it does not fit or the documents are not
    // there.
    void apply(const GivenPattern& given);

    BucketPlan plan;

  private:
    void choose_lengths();
    void open(std::int64_t bucket);
    void take_chosen(std::int64_t repeats, bool with_head);
    void choose(std::int64_t length, std::int64_t copies);
    bool replace_last_by_pair();
    bool promote();
    std::int64_t left(std::int64_t length) const;
    std::int64_t longest_left(std::int64_t limit) const;
    std::int64_t shortest_left() const;
    std::int64_t take(std::int64_t length, std::int64_t amount);
    std::int32_t take_head(std::int64_t tokens);

    const BucketRules& rules_;
    std::vector<std::int64_t> counts_;  // documents there are, by length
    std::vector<std::int64_t> taken_;   // documents taken so far, by length
    LengthSet present_;                 // lengths of which there are documents

    // The sample being chosen. Its documents are taken when it is complete.
    std::vector<PatternEntry> chosen_;
    std::int64_t bucket_ = 0;
    std::int64_t space_ = 0;  // tokens that it may still take
    std::int64_t slots_ = 0;  // segments that it may still take
};

// The given patterns, then drains what they leave of a pool.
BucketPlan plan_buckets(std::vector<std::int64_t> counts, const BucketRules& rules);

// Samples per bucket if a pool of counts[l] documents of length l is drained; counts from anywhere.
std::vector<std::int64_t> count_bucket_samples(std::vector<std::int64_t> counts,
                                               const BucketRules& rules);

}  // namespace megapack
