// Where every token of a micro batch goes: decided and checked in full before the first is copied.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/span.hpp"
#include "core/gather/fim.hpp"

namespace megapack {

enum class Positions { kSegment, kDocument, kSample };  // where position_ids restart
// Attention, and the label of a document's last token: stay in the document, go on in the documents
// of its group that stand behind it, or cross every boundary.
enum class Extent { kDocument, kGroup, kSample };

// What the loss mask makes of a step: every token weighs as its weight says, or every sequence
// (what a sample has of a document) weighs 1, its tokens in proportion to their weights.
enum class Loss { kTokenMean, kSequenceMean };

struct GatherOptions {
    Positions positions = Positions::kSegment;
    Extent attention = Extent::kDocument;
    Extent label_boundary = Extent::kDocument;
    Loss loss = Loss::kTokenMean;
    std::int64_t alignment = 1;  // attention segments start at multiples of this
    std::int64_t pad_token = 0;
    const Fim* fim = nullptr;  // none
};

// A row is cut into row_tokens / capacity equal slots, one sample each; what a slot has beyond its
// sample is padding.
struct GatherShape {
    std::int64_t num_rows;
    std::int64_t row_tokens;
    std::int64_t capacity;

    std::int64_t num_tokens() const { return num_rows * row_tokens; }
    std::int64_t slots_per_row() const { return row_tokens / capacity; }
};

// The label of a segment's last token: that at `at` in the file, or (literal >= 0) a token of its
// weight; none where `at` is -1.
struct Label {
    std::int64_t at = -1;
    std::int64_t literal = -1;
};

// What a sample has of one document, or (shard == nullptr) padding, and where it goes.
struct Piece {
    const Shard* shard;
    std::int64_t token_begin;
    std::int64_t length;
    std::int64_t room;            // length and the padding behind it
    std::int64_t first_position;  // position id of its first token
    Label last_label;             // of its last token
    float factor;                 // on its loss mask
    Part runs;                    // of a transformed document, else none: it is as in the file
};

// The next token of its document, or the first of the `next` segment of the sample, with
// label_boundary = kSample always and with kGroup where that is of its group.
Label last_label(const Segment& segment, const Segment* next, const std::vector<Run>& runs,
                 Extent label_boundary);

// What attends to itself only; source is -1 for padding.
struct AttentionSegment {
    std::int64_t length;
    std::int64_t room;
    std::int32_t source;
};

struct GatherPlan {
    GatherShape shape;
    std::vector<Piece> pieces;  // their rooms tile the rows, and so do the segments'
    std::vector<AttentionSegment> segments;
    std::vector<Run> runs;  // of transformed documents

    std::int64_t max_seqlen() const;
    std::vector<std::int32_t> sources() const;  // of every segment
};

// Samples fill the slots in order; slots without a sample are padding, one segment each.
// Throws what read_segments throws, and std::invalid_argument for a shape or an alignment that
// cannot hold the samples.
GatherPlan plan_gather(Span<const Shard> shards, Span<const SampleRef> samples,
                       const GatherShape& shape, const GatherOptions& options);

// cu_seqlens of all rows in one run (per_row = false: one list) or of each row (num_rows lists).
// Every list is filled with its last value up to `entries`; 0 means as many as the longest has.
// `padded` counts rooms instead of lengths.
std::vector<std::int32_t> cumulative_lengths(const GatherPlan& plan, bool padded, bool per_row,
                                             std::int64_t entries);

}  // namespace megapack
