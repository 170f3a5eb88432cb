// Inputs of the gather: token arrays and sample index of a shard, memory-mapped; what a step
// requires of its samples; shard of every sample id.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/span.hpp"
#include "core/index/view.hpp"
#include "core/storage/mmididx.hpp"

namespace megapack {

// Integer types of tokens and labels.
enum class TokenType : std::uint8_t { kUint8, kInt8, kInt16, kUint16, kInt32, kInt64 };

std::int64_t bytes_of(TokenType type);

struct TokenArray {
    const void* data = nullptr;
    std::int64_t size = 0;
    TokenType type = TokenType::kUint16;
};

// Prefetches memory into the processor's cache.
void prefetch(const std::uint8_t* begin, std::int64_t num_bytes);

// Prefetches elements [at, at + count).
inline void prefetch(const TokenArray& array, std::int64_t at, std::int64_t count) {
    const std::int64_t itemsize = bytes_of(array.type);
    prefetch(static_cast<const std::uint8_t*>(array.data) + at * itemsize, count * itemsize);
}

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

// Rows of a column, one per token of the shard.
struct ColumnArray {
    const std::uint8_t* data = nullptr;  // null: the shard lacks the column
    std::int64_t num_bytes = 0;
    std::int64_t row_bytes = 0;
};

// A shard of a source with its sample index. No number is trusted: numbers that serve as
// addresses are checked when they are read.
struct Shard {
    Shard() = default;  // not open: it has no samples
    explicit Shard(IndexView index) : documents(std::move(index)) {}

    std::int64_t source = 0;           // number of its source
    IndexView documents;               // the mapped .idx, read in place
    TokenArray tokens;                 // the mapped .bin
    TokenArray labels;                 // optional; one per token, not shifted; negative: no label
    TokenArray weights;                // optional; loss weight per token, as bits of float16
    std::vector<ColumnArray> columns;  // those that batches carry, see GatherOptions
    SampleView samples;                // without bucket_sample_offsets
    // Per segment: 1 if it continues the group of the segment before it; empty: none does.
    Span<const std::uint8_t> joined;
    // Prefix trees; empty: none. Per segment, the segment of its sample that it continues, -1:
    // none; documents [end_offsets[s], end_offsets[s + 1]) of end_documents end with segment s.
    Integers parents, end_offsets, end_documents;
    Span<const std::int64_t> excluded;      // excluded documents, ascending
    Span<const std::int64_t> excluded_by;   // number (from 1) of the first list that excludes each
    std::int64_t first_document = 0;        // number of its first document in the source
    std::int64_t longest_transformed = -1;  // documents of 2 to this many tokens may be transformed

    bool is_open() const { return samples.num_samples() >= 0; }
    bool has_trees() const { return end_offsets.size() > 0; }
    bool has_labels() const { return labels.data != nullptr; }
    bool has_weights() const { return weights.data != nullptr; }

    ColumnArray column(std::size_t c) const {
        return c < columns.size() ? columns[c] : ColumnArray{};
    }

    // Calls f(address, bytes per token) for the tokens and everything that is stored for them.
    template <typename F>
    void each_array(F f) const {
        for (const TokenArray& array : {tokens, labels, weights})
            if (array.data != nullptr)
                f(static_cast<const std::uint8_t*>(array.data), bytes_of(array.type));
        for (const ColumnArray& column : columns)
            if (column.data != nullptr) f(column.data, column.row_bytes);
    }
};

// A checked segment: it is inside its document, and the document inside the file.
struct Segment {
    std::int64_t document;
    std::int64_t begin;  // position in the document
    std::int64_t length;
    std::int64_t token_begin;  // position in the file
    bool ends_document;
    bool joined;          // the segment before it in the sample belongs to the same group
    std::int64_t parent;  // segment of the sample that it continues (prefix trees), -1: none
    std::int64_t placed;  // tokens in the batch; more than `length` if it is transformed
    Part runs;            // runs of a transformed document, else empty
};

// A document of a sample with prefix trees: the path from a root to the end of segment `last`.
struct TreeDocument {
    std::int64_t document;
    std::int64_t token_begin;  // position in the file
    std::int64_t length;
    std::int64_t last;
};

// What a step requires of its samples, like `StepView` in megapack/data/steps.py. A span is empty
// or has one entry per sample.
struct StepView {
    std::int64_t num_lists = 0;       // exclusion lists in force
    Span<const float> loss_weight;    // factor on the loss mask of each sample; empty: 1
    Span<const std::int64_t> epochs;  // epoch of each sample within its source
    Span<const double> fim_rates;     // share of documents to transform; empty: none
    std::uint64_t seed = 0;           // the run's seed

    // Throws std::invalid_argument unless the view has num_samples entries and rates in [0, 1].
    void check_entries(std::int64_t num_samples) const {
        const auto check_size = [&](const auto& values, const char* name) {
            check(values.data() == nullptr || values.size() == num_samples, values.size(), " ",
                  name, " for ", num_samples, " samples; give one for each");
        };
        check_size(loss_weight, "factors");
        check_size(epochs, "epochs");
        check_size(fim_rates, "fim_rates");
        check((epochs.data() == nullptr) == (fim_rates.data() == nullptr),
              "give epochs and fim_rates, or neither of them");
        for (const double rate : fim_rates)
            check(rate >= 0 && rate <= 1, "fim_rate is ", rate, "; it must be from 0 to 1");
    }
    // Returns true if exclusion list `list` (numbered from 1) is in force.
    bool excludes(std::int64_t list) const { return list <= num_lists; }
};

// Sample of an existing shard and its place in the view of the step, which the caller keeps alive.
struct SampleRef {
    std::int64_t shard;
    std::int64_t sample;
    const StepView* view = nullptr;  // null: no requirements
    std::int64_t position = 0;       // index in the view

    float factor() const {
        return view == nullptr || view->loss_weight.empty() ? 1.0F : view->loss_weight[position];
    }
};

// Checks that the sizes of the arrays agree; reads no element.
void check_shard(const Shard& shard);

// Samples of consecutive ids: ids [first_ids[r], first_ids[r + 1]) are samples of shards[r], from
// first_samples[r] on.
struct SampleRuns {
    Span<const std::int64_t> first_ids;  // (runs + 1), from 0 on, never descending
    Span<const std::int64_t> shards;
    Span<const std::int64_t> first_samples;
};

// Checks that the runs fit together and their shards are in [0, num_shards).
void check_runs(const SampleRuns& runs, std::int64_t num_shards);

// Finds the shard of every sample. Throws std::out_of_range for a sample that does not exist, and
// std::invalid_argument for a wrong view (StepView::check_entries).
std::vector<SampleRef> locate_samples(const SampleRuns& runs, Span<const std::int64_t> sample_ids,
                                      const StepView* view = nullptr);

// Returns the numbers of the shards that hold these samples but are not open, ascending.
std::vector<std::int64_t> not_open(Span<const Shard> shards, Span<const SampleRef> samples);

// Appends the segments of a sample to `out`, without those of excluded documents. Throws
// std::out_of_range for a sample that does not exist and FormatError for an index that points
// outside its dataset.
void read_segments(const Shard& shard, SampleRef ref, std::vector<Segment>& out);

// Returns the documents of a sample with prefix trees, in the order of their last segments. Throws
// like read_segments.
std::vector<TreeDocument> read_documents(const Shard& shard, SampleRef ref);

}  // namespace megapack
