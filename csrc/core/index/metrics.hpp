// What a packing is worth, counted from its arrays alone (not from what a strategy says of itself).
#pragma once

#include "core/base/ratio.hpp"
#include "core/packing/types.hpp"

namespace megapack {

// A view of the arrays of Samples, wherever they lie (a memory-mapped file, for example).
template <typename Id, typename Length>
struct SampleView {
    Span<const std::int64_t> bucket_sample_offsets;
    Span<const std::int64_t> sample_segment_offsets;
    Span<const Id> segment_document;
    Span<const Length> segment_begin;
    Span<const std::int32_t> segment_length;
};

struct SegmentTotals {
    std::vector<std::int64_t> tokens_per_bucket;  // placed, padding not counted
    std::int64_t cut_documents = 0;               // documents with a segment behind their first
    Wide segment_squares = 0;                     // sum of segment length squared
    Wide sample_squares = 0;                      // sum of (tokens in a sample) squared
};

// Needs no document lengths: reading them at random would take most of the time.
template <typename Id, typename Length>
SegmentTotals measure(const SampleView<Id, Length>& samples, std::int64_t num_documents);

// Segments that are a document from end to end.
template <typename Id, typename Length>
std::int64_t whole_documents(const SampleView<Id, Length>& samples, Span<const Length> lengths);

// Per sample: tokens whose next token is known, which is every token but the last of a document.
template <typename Id, typename Length>
std::vector<std::int64_t> label_tokens(const SampleView<Id, Length>& samples,
                                       Span<const Length> lengths);

// Per sample: the sum of segment length squared, the work of attention inside documents.
std::vector<std::int64_t> attention_cost(Span<const std::int64_t> sample_segment_offsets,
                                         Span<const std::int32_t> segment_length);

// Throws FormatError at the first number that breaks a law, whatever the arrays hold: capacities
// and offsets ascend and cover all samples and segments, no sample is empty or exceeds its
// capacity, no segment is empty or leaves its document.
template <typename Id, typename Length>
void check_laws(const SampleView<Id, Length>& samples, Span<const std::int64_t> capacities,
                Span<const Length> lengths);

}  // namespace megapack
