// What the gather reads: token arrays and the sample index, memory-mapped as they lie on disk.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/span.hpp"
#include "core/index/view.hpp"
#include "core/storage/mmididx.hpp"

namespace megapack {

// The integer types of .bin files (and of label files beside them).
enum class TokenType : std::uint8_t { kUint8, kInt8, kInt16, kUint16, kInt32, kInt64 };

std::int64_t bytes_of(TokenType type);

struct TokenArray {
    const void* data = nullptr;
    std::int64_t size = 0;
    TokenType type = TokenType::kUint16;
};

// Has these elements brought into the cache; changes nothing else.
void prefetch(const TokenArray& from, std::int64_t at, std::int64_t count);

// Calls f with a typed pointer to element `at`.
template <typename F>
auto with_type(const TokenArray& array, std::int64_t at, F f) {
    switch (array.type) {
        case TokenType::kUint8:
            return f(static_cast<const std::uint8_t*>(array.data) + at);
        case TokenType::kInt8:
            return f(static_cast<const std::int8_t*>(array.data) + at);
        case TokenType::kInt16:
            return f(static_cast<const std::int16_t*>(array.data) + at);
        case TokenType::kUint16:
            return f(static_cast<const std::uint16_t*>(array.data) + at);
        case TokenType::kInt32:
            return f(static_cast<const std::int32_t*>(array.data) + at);
        case TokenType::kInt64:
            break;
    }
    return f(static_cast<const std::int64_t*>(array.data) + at);
}

// One dataset with its sample index: a source, or one of the shards of a source. Nothing in it is
// trusted: every number that is used as an address is checked at the moment it is read.
struct Shard {
    Shard() = default;  // not open yet: it has no samples
    explicit Shard(IndexView index) : documents(std::move(index)) {}

    std::int64_t source = 0;  // number of the source that it is of
    IndexView documents;      // the mapped .idx: no table per process, nothing to build
    TokenArray tokens;        // the mapped .bin
    TokenArray labels;        // beside the tokens, not shifted, -100 = none; may be absent
    TokenArray weights;       // of their losses, beside the tokens: bits of float16; may be absent
    SampleView samples;       // without bucket_sample_offsets
    // Of every segment whether it goes on in the group of the one before it; empty: none does.
    Span<const std::uint8_t> joined;
    Span<const std::int64_t> excluded;     // documents that some list masks, ascending
    Span<const std::int64_t> excluded_by;  // the first list that has each, counted from 1
    std::int64_t first_document = 0;       // its number in the source
    std::int64_t fim_longest = -1;  // documents of 2 to so many tokens have room for sentinels

    bool is_open() const { return samples.num_samples() >= 0; }
    bool has_labels() const { return labels.data != nullptr; }
    bool has_weights() const { return weights.data != nullptr; }
};

// A segment that has been checked: it lies inside its document, and the document inside the file.
struct Segment {
    std::int64_t document;
    std::int64_t begin;  // position in the document
    std::int64_t length;
    std::int64_t token_begin;  // position in the file
    bool ends_document;
    bool joined;          // the segment before it is of its group, and stands in the sample
    std::int64_t placed;  // tokens in the batch, more than in the file where it has runs
    Part runs;            // what a transformed document consists of (fim.hpp)
};

// What a step requires of its samples, as `StepView` in megapack/data/steps.py. A span is empty or
// has one entry per sample.
struct StepView {
    std::int64_t num_lists = 0;       // exclusion lists in force
    Span<const float> loss_weight;    // factors on the losses of the samples; empty: 1
    Span<const std::int64_t> epochs;  // epoch of each sample within its source, for fim.hpp
    Span<const double> fim_rates;     // share of documents that are transformed; empty: none
    std::uint64_t seed = 0;           // of the run
};

// A sample of an existing shard, with what the step requires of it.
struct SampleRef {
    std::int64_t shard;
    std::int64_t sample;
    std::int64_t num_lists = 0;  // exclusion lists in force
    float factor = 1.0F;         // on the loss of its labels
    std::int64_t epoch = 0;
    double fim_rate = 0;
    std::uint64_t seed = 0;
};

// Refuses arrays whose sizes contradict each other. Costs nothing: no element is read.
void check_shard(const Shard& shard);

// What sample ids stand for, whatever is open: the ids of run r, from first_ids[r] on, are
// consecutive samples of shards[r], from first_samples[r] on.
struct SampleRuns {
    Span<const std::int64_t>
        first_ids;  // one more than there are runs; from 0 on, never descending
    Span<const std::int64_t> shards;
    Span<const std::int64_t> first_samples;
};

// Refuses runs that contradict each other, or speak of other shards than [0, num_shards).
void check_runs(const SampleRuns& runs, std::int64_t num_shards);

// Finds the shard of every sample. Throws std::out_of_range for a sample that does not exist, and
// std::invalid_argument for a view with too few or too many entries or a rate outside [0, 1].
std::vector<SampleRef> locate_samples(const SampleRuns& runs, Span<const std::int64_t> sample_ids,
                                      const StepView& view = {});

// Numbers of those shards of some samples that are not open, ascending.
std::vector<std::int64_t> not_open(Span<const Shard> shards, Span<const SampleRef> samples);

// The segments of a sample in order but those of excluded documents, appended to `out`. Throws
// std::out_of_range for a sample that does not exist and FormatError for an index that points
// outside its dataset.
void read_segments(const Shard& shard, SampleRef ref, std::vector<Segment>& out);

}  // namespace megapack
