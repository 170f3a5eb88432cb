// What a packing is worth and what is true of every packing, read from its arrays alone (not from
// what a strategy says of itself): measure, whole_documents, label_tokens, attention_cost,
// attention_cost_of, check_laws.
#pragma once

#include <vector>

#include "core/base/ratio.hpp"
#include "core/index/view.hpp"

namespace megapack {

struct SegmentTotals {
    std::vector<std::int64_t> tokens_per_bucket;  // placed, padding not counted
    std::int64_t cut_documents = 0;               // documents with a segment behind their first
    Wide segment_squares = 0;                     // sum of segment length squared
    Wide sample_squares = 0;                      // sum of (tokens in a sample) squared
};

// Needs no document lengths: reading them at random would take most of the time.
SegmentTotals measure(const SampleView& samples, std::int64_t num_documents);

// Segments that are a document from end to end.
std::int64_t whole_documents(const SampleView& samples, const Integers& lengths);

// Per sample: tokens whose next token is known, which is every token but the last of a document.
std::vector<std::int64_t> label_tokens(const SampleView& samples, const Integers& lengths);

// Per sample: the sum of segment length squared, the work of attention inside documents. Reads
// sample_segment_offsets and segment_length alone.
std::vector<std::int64_t> attention_cost(const SampleView& samples);

// Attention work of some samples of one capacity in units of token pairs: the sum over segments of
// length^2, the padding of a sample being a segment too. With whole = true the sample is one
// segment. Multiply by one layer's head work to get FLOPs; the linear layers' work is the same for
// all samples of one capacity. Reads what attention_cost reads.
std::vector<std::int64_t> attention_cost_of(const SampleView& samples,
                                            Span<const std::int64_t> chosen, std::int64_t capacity,
                                            bool whole);

// Throws FormatError at the first number that breaks a law, whatever the arrays hold: capacities
// and offsets ascend and cover all samples and segments, no sample is empty or exceeds its
// capacity, no segment is empty or leaves its document.
void check_laws(const SampleView& samples, Span<const std::int64_t> capacities,
                const Integers& lengths);

}  // namespace megapack
