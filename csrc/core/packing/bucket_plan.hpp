// Plan of the bucket strategies, made from a histogram of lengths: which lengths share a sample.
//
// A sample gets the smallest bucket that holds the longest document, then repeatedly the longest
// document that still fits (BucketLLM, Algorithm 2). The choice depends on lengths only, so one
// pattern serves as many samples as the histogram has documents for: about ten thousand patterns
// suffice for any number of documents. Documents of equal length are taken in order, so the samples
// equal those of the rule applied document by document.
//
//     counts {2: 4, 5: 2}, buckets {8}  ->  2 samples of lengths 5 2, 1 sample of lengths 2 2
#pragma once

#include <vector>

#include "core/packing/length_set.hpp"
#include "core/packing/strategy.hpp"

namespace megapack {

// `copies` documents of `length`, starting with document number `rank` of that length.
struct PatternEntry {
    std::int32_t length, copies;
    std::int64_t rank;
};

// `count` samples of the same lengths; sample i starts with document entry.rank + i * entry.copies.
struct Pattern {
    std::int64_t count;
    std::uint32_t end_entry;  // after its last entry; entries of patterns are contiguous
    std::int32_t bucket;
    std::int32_t head;  // index of the head that fills the sample, or -1
};

// The first `tokens` tokens of document `rank` of class `length`. What remains of it becomes
// document `rest_rank` of class `length - tokens`.
struct Head {
    std::int32_t length, tokens;
    std::int64_t rank, rest_rank;
};

struct BucketPlan {
    std::vector<Pattern> patterns;
    std::vector<PatternEntry> entries;
    std::vector<Head> heads;
    std::vector<std::int64_t> samples_in_bucket, segments_in_bucket;

    // Keeps only the counts. (`= {}` would keep the memory of the vectors.)
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

// Decides patterns one by one. Documents of a class are taken in order: first the constructor's,
// then those added later.
class BucketPlanner {
  public:
    // Starts with counts[l] documents of length l. Later ones must not be longer than
    // counts.size() - 1, which is at most the largest capacity.
    BucketPlanner(std::vector<std::int64_t> counts, const BucketRules& rules);

    void add(std::int64_t length);
    bool empty() const { return present_.empty(); }
    std::int64_t longest() const { return present_.largest(); }

    // Appends the next pattern to the plan, at most `max_repeats` samples of it.
    void next(std::int64_t max_repeats);

    // Appends a given pattern. Throws if it does not fit or too few documents remain.
    void apply(const GivenPattern& given);

    BucketPlan plan;

  private:
    void choose_lengths();
    void look_ahead();
    void open(std::int64_t bucket);
    void take_chosen(std::int64_t repeats, bool with_head);
    void choose(std::int64_t length, std::int64_t copies);
    bool replace_last_by_pair();
    bool promote();
    std::int64_t unchosen(std::int64_t length) const;
    std::int64_t longest_unchosen(std::int64_t limit) const;
    std::int64_t shortest_unchosen() const;
    std::int64_t take(std::int64_t length, std::int64_t amount);
    std::int32_t take_head(std::int64_t tokens);

    const BucketRules& rules_;
    std::vector<std::int64_t> counts_;  // documents not yet taken, by length
    std::vector<std::int64_t> taken_;   // documents taken, by length
    LengthSet present_;                 // lengths with counts_ > 0

    // The open sample. Its documents are taken when it is complete.
    std::vector<PatternEntry> chosen_;
    std::int64_t bucket_ = 0;
    std::int64_t space_ = 0;  // free tokens
    std::int64_t slots_ = 0;  // free segments
};

// Plans a whole pool: first the given patterns, then all other documents.
BucketPlan plan_buckets(std::vector<std::int64_t> counts, const BucketRules& rules);

// Returns the samples per bucket of a pool with counts[l] documents of length l; checks `counts`.
std::vector<std::int64_t> count_bucket_samples(std::vector<std::int64_t> counts,
                                               const BucketRules& rules);

}  // namespace megapack
