// Plan of a micro batch: the place of every token, all checked before the first token is copied.
//
//     samples of documents 5 + 1 and 3 tokens, one row of 14, capacity 7
//         ->  pieces of 5, 1, 1 (padding), 3, 4 (padding) tokens; cu_seqlens {0, 5, 6, 7, 10, 14}
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/span.hpp"
#include "core/gather/fim.hpp"

namespace megapack {

enum class Positions { kSegment, kDocument, kSample };  // where position_ids restart
// Reach of attention, and of the label of a document's last token: the document, the following
// documents of its group, or the whole sample. Attention kTree: the segments on the path from a
// root of a prefix tree; then labels and loss mask belong to the predicted token, not to the token
// before it, because several tokens can follow one.
enum class Extent { kDocument, kGroup, kSample, kTree };

// Unit of the loss mask. kTokenMean: each token's own loss weight. kSequenceMean: the weights of a
// sequence (the tokens of a document in a sample) sum to 1.
enum class Loss { kTokenMean, kSequenceMean };

// A column that batches carry (ColumnSpec in megapack/storage/columns.py).
struct CarriedColumn {
    std::vector<std::uint8_t> fill;  // a row for places without one, such as padding
    bool of_target = false;          // a position has the row of the token that it predicts

    std::int64_t row_bytes() const { return ssize(fill); }
};

struct GatherOptions {
    Positions positions = Positions::kSegment;
    Extent attention = Extent::kDocument;
    Extent label_boundary = Extent::kDocument;
    Loss loss = Loss::kTokenMean;
    std::int64_t alignment = 1;  // attention segments start at multiples of this
    std::int64_t pad_token = 0;
    const Fim* transform = nullptr;  // null: no transformation
    std::vector<CarriedColumn> columns = {};
};

// A row has row_tokens / capacity equal slots, one sample each. The rest of a slot is padding.
struct GatherShape {
    std::int64_t num_rows;
    std::int64_t row_tokens;
    std::int64_t capacity;

    std::int64_t num_tokens() const { return num_rows * row_tokens; }
    std::int64_t slots_per_row() const { return row_tokens / capacity; }
};

// Label of the last token of a segment: the token at `at` in the file, or (literal >= 0) a token
// with its loss weight. at = -1: no label.
struct Label {
    std::int64_t at = -1;
    std::int64_t literal = -1;
};

// Tokens of one document in a sample, or (shard == nullptr) padding.
struct Piece {
    const Shard* shard;
    std::int64_t token_begin;
    std::int64_t length;
    std::int64_t room;            // length plus the padding after it
    std::int64_t first_position;  // position id of its first token
    Label last_label;             // label of its last token
    float factor;                 // factor on its loss mask
    Part runs;                    // runs of a transformed document, else empty
};

// Returns the label of a segment's last token: the document's next token or, at the document's end,
// the first token of the `next` segment if label_boundary reaches it.
Label last_label(const Segment& segment, const Segment* next, const std::vector<Run>& runs,
                 Extent label_boundary);

// A segment of cu_seqlens: its tokens attend only to each other. source is -1 for padding.
struct AttentionSegment {
    std::int64_t length;
    std::int64_t room;
    std::int32_t source;
    std::int32_t parent = -1;  // segment of the plan that it continues (kTree)
};

// A document that adds its loss weights to the tokens on its path. In kTree, piece i is segment i.
struct TreePath {
    const Shard* shard;
    TreeDocument document;  // `last` counts the segments of the plan
    float factor;
};

struct GatherPlan {
    GatherShape shape;
    std::vector<Piece> pieces;  // like the segments, their rooms add up to all rows
    std::vector<AttentionSegment> segments;
    std::vector<Run> runs;        // runs of transformed documents
    std::vector<TreePath> paths;  // kTree

    std::int64_t max_seqlen() const;
    std::vector<std::int32_t> sources() const;  // per segment
};

// Plans a micro batch. Samples fill the slots in order; a slot without a sample is one segment of
// padding. Throws like read_segments, and std::invalid_argument for a shape or an alignment that
// cannot hold the samples.
GatherPlan plan_gather(Span<const Shard> shards, Span<const SampleRef> samples,
                       const GatherShape& shape, const GatherOptions& options);

// Returns cu_seqlens: one list for all rows or, with per_row, one per row. Repeats the last value
// of a list until it has `entries` values; 0: as many as the longest list. `padded`: a segment
// includes the padding after it.
std::vector<std::int32_t> cumulative_lengths(const GatherPlan& plan, bool padded, bool per_row,
                                             std::int64_t entries);

// Paths of a plan with prefix trees, padding included: the keys of segment i are the row indices
// kv_index[cu_seqlens_k[i]:cu_seqlens_k[i + 1]], from a root to its last token; predecessors: row
// index of the token before each token on its path, -1 for the first and for padding.
struct TreeKeys {
    std::vector<std::int32_t> cu_seqlens_k, kv_index, predecessors;
};

TreeKeys tree_keys(const GatherPlan& plan);

}  // namespace megapack
