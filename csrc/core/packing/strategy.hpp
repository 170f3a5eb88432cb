// The strategies of the core: the rules of each, and the samples that all of them return.
//
//     pad             a document per sample, the rest padding                  simple.cpp
//     concat          documents joined into one stream, cut every capacity     simple.cpp
//     bucket_naive    concat per bucket (BucketLLM's "Naive Bucketing")        simple.cpp
//     next_fit        a document that does not fit opens the next sample       simple.cpp
//     length_sorted   next_fit from short to long documents                    simple.cpp
//     decompose       documents cut by the binary digits of their length       simple.cpp
//     fit_decreasing  first fit and best fit, from long to short               fit.cpp
//     seamless        overlapping windows, then first fit                      fit.cpp
//     bucket          per sample: the longest document, then what fits best    bucket.cpp
//     bucket_stream   bucket on a pool that is refilled (BucketLLM, Alg. 1)    bucket.cpp
//     bucket_second   bucket for documents with a second size                  bucket_second.cpp
//
// A strategy is
//
//     template <typename Id, typename Length>
//     Samples<Id, Length> pack_<name>(const Lengths<Length>&, const <Name>Rules&, const Run&);
//
// It checks its rules first. Documents of 3, 9 and 4 tokens in samples of 8:
//
//     pack_concat      ->  [0: 0..3, 1: 0..5]  [1: 5..9, 2: 0..4]
//     pack_next_fit    ->  [1: 0..8]  [0: 0..3, 1: 8..9, 2: 0..4]
#pragma once

#include <limits>
#include <utility>
#include <vector>

#include "core/base/ratio.hpp"
#include "core/packing/documents.hpp"

namespace megapack {

// ---- Samples

// Samples grouped by bucket, in the arrays of megapack's SampleIndex (docs/file_formats.md);
// segment_* have one entry per segment.
template <typename Id, typename Length>
struct Samples {
    std::vector<std::int64_t> bucket_capacity;
    std::vector<std::int64_t> bucket_sample_offsets;
    Buffer<std::int64_t> sample_segment_offsets;
    Buffer<Id> segment_document;
    Buffer<Length> segment_begin;
    Buffer<std::int32_t> segment_length;
    std::int64_t dropped_tokens = 0;
    std::int64_t repeated_tokens = 0;

    // `sample_offsets`: first sample of every bucket and, last, the number of samples. Both it and
    // `num_segments` may be upper bounds, see `truncate`.
    Samples(std::vector<std::int64_t> capacities, std::vector<std::int64_t> sample_offsets,
            std::int64_t num_segments)
        : bucket_capacity(std::move(capacities)),
          bucket_sample_offsets(std::move(sample_offsets)),
          sample_segment_offsets(num_samples() + 1),
          segment_document(num_segments),
          segment_begin(num_segments),
          segment_length(num_segments) {
        sample_segment_offsets[num_samples()] = num_segments;
    }

    std::int64_t num_samples() const { return bucket_sample_offsets.back(); }

    void open_sample(std::int64_t sample, std::int64_t segment) const {
        sample_segment_offsets[sample] = segment;
    }
    void put(std::int64_t segment, Id document, Length begin, std::int64_t length) const {
        segment_document[segment] = document;
        segment_begin[segment] = begin;
        segment_length[segment] = static_cast<std::int32_t>(length);
    }
    // Makes segment `at` the only segment of sample `at`.
    void put_alone(std::int64_t at, Id document, Length begin, std::int64_t length) const {
        open_sample(at, at);
        put(at, document, begin, length);
    }
    // Replaces upper bounds of the constructor by the true numbers; shortens the last bucket.
    void truncate(std::int64_t samples, std::int64_t segments) {
        bucket_sample_offsets.back() = samples;
        sample_segment_offsets.truncate(samples + 1);
        segment_document.truncate(segments);
        segment_begin.truncate(segments);
        segment_length.truncate(segments);
        sample_segment_offsets[samples] = segments;
    }
    // Drops the last sample if it is not full. The packing must have one bucket.
    void drop_partial_sample() {
        const std::int64_t last = num_samples() - 1;
        if (last < 0) return;
        const std::int64_t first = sample_segment_offsets[last];
        std::int64_t tokens = 0;
        for (std::int64_t s = first; s < segment_length.size(); ++s) tokens += segment_length[s];
        if (tokens == bucket_capacity.back()) return;
        dropped_tokens += tokens;
        truncate(last, first);
    }
};

// ---- Rules; every check throws std::invalid_argument

// Every thread or pool keeps a histogram with an entry for each length up to the capacity.
constexpr std::int64_t kMaxCapacity = std::int64_t{1} << 24;

inline void check_capacity(std::int64_t capacity) {
    check(capacity >= 1 && capacity <= kMaxCapacity, "a capacity is ", capacity,
          " tokens; it must be from 1 to ", kMaxCapacity);
}

inline void check_capacities(const std::vector<std::int64_t>& capacities) {
    check(!capacities.empty(), "there are no buckets; give at least one capacity in tokens");
    for (std::int64_t b = 0; b < ssize(capacities); ++b) {
        check_capacity(capacities[b]);
        check(b == 0 || capacities[b - 1] < capacities[b], "buckets must ascend; ", capacities[b],
              " follows ", capacities[b == 0 ? 0 : b - 1]);
    }
}

// extra_capacity: tokens by which bins may exceed the capacity; a bin loses what exceeds it.
inline void check_extra_capacity(std::int64_t extra_capacity) {
    check(extra_capacity >= 0 && extra_capacity <= kMaxCapacity, "extra_capacity is ",
          extra_capacity, " tokens; it must be from 0 to ", kMaxCapacity);
}

// Atom sizes (Chen et al. 2024, A.3): the corpus is cut into atoms of `atom_size` tokens, which are
// shuffled and then merged (atom_size < capacity) or split (atom_size > capacity) into samples.
//
// One of atom_size and capacity divides the other. The smaller one is a *unit*: atoms and samples
// consist of units. If atom_size equals capacity, an atom is a sample and nothing is shuffled,
// because the schedule decides the order of samples.
struct AtomSize {
    std::int64_t capacity, atom_size;

    std::int64_t unit() const { return atom_size < capacity ? atom_size : capacity; }
    void check_sizes() const {
        check_capacity(capacity);
        constexpr std::int64_t kLimit = std::numeric_limits<std::int32_t>::max();
        check(atom_size >= 1 && atom_size <= kLimit, "atom_size is ", atom_size,
              "; it must be from 1 to ", kLimit);
        check(capacity % atom_size == 0 || atom_size % capacity == 0, "atom_size is ", atom_size,
              " and the capacity ", capacity, "; one must be a multiple of the other");
    }
};

// Atoms are pieces of documents; a piece shorter than its unit is padded. All padding of a sample
// is at its end, as in every strategy.
struct PadRules {
    AtomSize sizes;
};

struct ConcatRules {
    AtomSize sizes;          // full atoms are shuffled, a partial one stays last
    bool shuffle = false;    // documents are joined in seeded order (Purpose::kDocuments)
    bool drop_last = false;  // drops the last sample if it is not full
};

// A document goes to the smallest bucket that holds it, else to the largest; concat per bucket.
struct BucketNaiveRules {
    std::vector<std::int64_t> capacities;  // ascending
    bool shuffle = false;                  // documents in seeded order (Purpose::kDocuments)
};

// A full chunk of a document is a sample. The rest goes to the open sample; if it does not fit, a
// new sample is opened.
struct NextFitRules {
    std::int64_t capacity;
    bool shuffle = false;  // documents in seeded order (Purpose::kDocuments)
};

// next_fit of the rests (sort.hpp) from short to long, equal lengths in file order.
struct LengthSortedRules {
    std::int64_t capacity;
};

// Dataset Decomposition (Pouransari et al. 2024): a document is cut into pieces of 2^k tokens, one
// per binary digit 1 of its length, largest first; the digits above the largest bucket become
// repeats of it, the digits below the smallest are dropped. A piece is a sample.
struct DecomposeRules {
    std::vector<std::int64_t> capacities;  // all powers of two from the smallest to the largest
};

// First fit chooses the bin that was opened first among those that fit; best fit chooses the bin
// with the least space and, among equals, the one that reached that space first.
enum class Fit { kFirst, kBest };

// A full chunk of a document is a sample. The rests go, from long to short, into bins of
// capacity + extra_capacity.
struct FitRules {
    std::int64_t capacity;
    std::int64_t extra_capacity = 0;
    Fit fit = Fit::kFirst;
};

// Start positions of the windows of a long document.
//   kExact: evenly spread, no token lost.
//   kPaper: equation 3 as printed, which may lose the end of the document.
//   kPublished: the arithmetic of the authors' program.
enum class Placement { kExact, kPaper, kPublished };

// Seamless Packing (Yin et al. 2025, section 3): long documents are covered by overlapping windows
// if that needs little repetition; everything else goes to bins slightly larger than a sample.
struct SeamlessRules {
    std::int64_t capacity;
    Ratio r_max;  // largest repeated share of a sample
    Placement placement;
    std::int64_t extra_capacity = 0;
    bool drop_last = false;  // drops the last sample if it is not full
};

// Treatment of a sample in which no document fits and whose space exceeds the threshold.
enum class Overflow {
    kPad,      // pad it, as below the threshold
    kHead,     // fill it with the head of the shortest document (BucketLLM)
    kPromote,  // move it to a larger bucket
};

// `count` samples of `bucket` that the caller decided: (length, copies) pairs, longest first.
struct GivenPattern {
    std::int32_t bucket;
    std::int64_t count;
    std::vector<std::pair<std::int32_t, std::int32_t>> lengths;
};

// `bucket`: every document draws one of ceil(n / pool_size) pools (Purpose::kPools). All documents
// of a pool are packed before the next pool; equal lengths are taken in file order. Given patterns
// need a single pool.
//
// `bucket_stream`: documents in shuffled order (Purpose::kDocuments) enter one pool; once it has
// pool_size documents, one sample is packed after each; at the end the pool is packed completely. A
// document longer than the largest bucket is cut to it when it is the longest of the pool.
struct BucketRules {
    std::vector<std::int64_t> capacities;  // ascending
    Overflow overflow = Overflow::kPad;
    Ratio padding_threshold;        // as a share of the capacity
    bool pairs = false;             // BucketLLM's pair search (Algorithm 2, lines 6 to 12)
    bool lookahead = false;         // prefers documents that leave no space, or enough for another
    bool shuffle_segments = false;  // segments in seeded order (a head last), not longest first
    // Average number of documents that are packed together; at least 1.
    std::int64_t pool_size = std::int64_t{1} << 20;
    // Most segments of a sample of the largest bucket; smaller buckets in proportion; 0: no limit.
    std::int64_t max_segments = 0;
    std::vector<GivenPattern> given;  // packed first

    void check_rules() const {
        check_capacities(capacities);
        check(pool_size >= 1, "pool_size is ", pool_size, "; it must be at least 1");
        check(max_segments >= 0 && max_segments <= std::numeric_limits<std::int32_t>::max(),
              "max_segments is ", max_segments, "; it must be from 0 (any number) to 2^31 - 1");
    }
    std::int64_t segment_limit(std::int64_t bucket) const {
        if (max_segments == 0) return std::numeric_limits<std::int64_t>::max();
        return std::max<std::int64_t>(max_segments * capacities[bucket] / capacities.back(), 1);
    }
    bool exceeds_threshold(std::int64_t space, std::int64_t bucket) const {
        return padding_threshold.exceeded_by(space, capacities[bucket]);
    }
};

struct TwoSizes {
    std::int64_t tokens, second;
};

// `bucket_second`: a sample starts with the document that takes the largest share of the largest
// bucket, in the smallest bucket that holds it. A document is heavy if it has more of the second
// size per token than the pool; heavy and light documents are in two lists. While some document
// fits in both capacities, compare the second size per token of the sample with that of the
// documents that were unpacked when the sample was opened: if the sample has less, take the heavy
// document with the largest second size, else the longest light one. If none in that list fits,
// take one from the other list. To promote a sample is to move it to the smallest larger bucket in
// which a document fits. Every segment of a cut document counts with the second size of the whole
// document.
struct BucketSecondRules {
    BucketRules bucket;                           // pads or promotes; no pairs or given patterns
    Span<const std::int64_t> second;              // of every document
    std::vector<std::int64_t> second_capacities;  // of every bucket, not descending

    std::int64_t num_buckets() const { return ssize(bucket.capacities); }
    TwoSizes capacity(std::int64_t b) const { return {bucket.capacities[b], second_capacities[b]}; }
    void check_rules(std::int64_t num_documents) const;
};

// ---- The strategies

#define MEGAPACK_DECLARE_STRATEGY(name, Rules)                                          \
    template <typename Id, typename Length>                                             \
    Samples<Id, Length> pack_##name(const Lengths<Length>& lengths, const Rules& rules, \
                                    const Run& run)

MEGAPACK_DECLARE_STRATEGY(pad, PadRules);
MEGAPACK_DECLARE_STRATEGY(concat, ConcatRules);
MEGAPACK_DECLARE_STRATEGY(bucket_naive, BucketNaiveRules);
MEGAPACK_DECLARE_STRATEGY(next_fit, NextFitRules);
MEGAPACK_DECLARE_STRATEGY(length_sorted, LengthSortedRules);
MEGAPACK_DECLARE_STRATEGY(decompose, DecomposeRules);
MEGAPACK_DECLARE_STRATEGY(fit_decreasing, FitRules);
MEGAPACK_DECLARE_STRATEGY(seamless, SeamlessRules);
MEGAPACK_DECLARE_STRATEGY(bucket, BucketRules);
MEGAPACK_DECLARE_STRATEGY(bucket_stream, BucketRules);
MEGAPACK_DECLARE_STRATEGY(bucket_second, BucketSecondRules);

// Instantiates a strategy, in its source file, for the widths that occur. (Documents of more than
// 2^31 - 1 tokens always use wide document numbers; `pack` narrows them.)
#define MEGAPACK_INSTANTIATE_STRATEGY(name, Rules)                    \
    MEGAPACK_INSTANTIATE_AS(name, Rules, std::int32_t, std::int32_t); \
    MEGAPACK_INSTANTIATE_AS(name, Rules, std::int64_t, std::int32_t); \
    MEGAPACK_INSTANTIATE_AS(name, Rules, std::int64_t, std::int64_t)
#define MEGAPACK_INSTANTIATE_AS(name, Rules, Id, Length) \
    template Samples<Id, Length> pack_##name(const Lengths<Length>&, const Rules&, const Run&)

}  // namespace megapack
