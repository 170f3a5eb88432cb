// Writes tokens, labels, loss mask, positions and columns of a planned micro batch to the caller's
// memory, and counts labels without gathering.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/span.hpp"
#include "core/gather/plan.hpp"

namespace megapack {

// Row-major (num_rows, row_tokens); shape.num_tokens() elements each.
struct GatherOutput {
    Span<std::int64_t> tokens;
    Span<std::int64_t> labels;
    Span<float> loss_mask;
    Span<std::int64_t> position_ids;
    std::vector<Span<std::uint8_t>> columns = {};  // of GatherOptions; num_tokens() rows each
};

void fill_gather(const GatherPlan& plan, const GatherOptions& options, const GatherOutput& out);

// Labels of a sample.
struct LabelTotals {
    std::int64_t labels = 0;     // tokens with a label
    double weight = 0;           // sum of their loss weights, exact below 2^29
    std::int64_t sequences = 0;  // segments with a label of weight above 0; of trees: documents

    LabelTotals& operator+=(const LabelTotals& more) {
        labels += more.labels;
        weight += more.weight;
        sequences += more.sequences;
        return *this;
    }
};

std::vector<LabelTotals> count_labels(Span<const Shard> shards, Span<const SampleRef> samples,
                                      const GatherOptions& options);

}  // namespace megapack
