// Metrics and checks of a packing, computed from its arrays: measure, whole_documents,
// label_tokens, attention_cost, attention_cost_of, check_laws.
//
//     samples [0: 0..3, 1: 0..5] [1: 5..9, 2: 0..4] of documents of 3, 9 and 4 tokens
//         ->  whole_documents 2, label_tokens {7, 6}, attention_cost {34, 32}
#pragma once

#include <vector>

#include "core/base/ratio.hpp"
#include "core/index/view.hpp"

namespace megapack {

struct SegmentTotals {
    std::vector<std::int64_t> tokens_per_bucket;  // without padding
    std::int64_t cut_documents = 0;               // with a segment that does not begin at 0
    Wide segment_squares = 0;                     // sum of segment length squared
    Wide sample_squares = 0;                      // sum of (tokens in a sample) squared
};

// Sums over segments. Does not read document lengths, since random reads would take most time.
SegmentTotals measure(const SampleView& samples, std::int64_t num_documents);

// Counts the segments that are whole documents.
std::int64_t whole_documents(const SampleView& samples, const Integers& lengths);

// Returns, per sample, the number of tokens that have a next token in their document.
std::vector<std::int64_t> label_tokens(const SampleView& samples, const Integers& lengths);

// Returns, per sample, the sum of squared segment lengths: the work of attention inside documents.
// Reads only sample_segment_offsets and segment_length.
std::vector<std::int64_t> attention_cost(const SampleView& samples);

// Returns the attention work of some samples of one capacity in token pairs: the sum of squared
// segment lengths. Padding counts as a segment. With whole = true a sample is one segment. Multiply
// by the head work of a layer to get FLOPs; the work of linear layers is equal for all samples of a
// capacity. Reads only sample_segment_offsets and segment_length.
std::vector<std::int64_t> attention_cost_of(const SampleView& samples,
                                            Span<const std::int64_t> chosen, std::int64_t capacity,
                                            bool whole);

// Throws FormatError at the first violation, for any content of the arrays: capacities and offsets
// ascend and cover all samples and segments, no sample is empty or exceeds its capacity, no segment
// is empty or outside its document.
void check_laws(const SampleView& samples, Span<const std::int64_t> capacities,
                const Integers& lengths);

}  // namespace megapack
