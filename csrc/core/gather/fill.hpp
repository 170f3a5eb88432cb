// Tokens, labels, loss mask and positions of a planned micro batch, written to the caller's memory.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/span.hpp"
#include "core/gather/plan.hpp"

namespace megapack {

// Row-major (num_rows, row_tokens), each of shape.num_tokens() elements.
struct GatherOutput {
    Span<std::int64_t> tokens;
    Span<std::int64_t> labels;
    Span<float> loss_mask;
    Span<std::int64_t> position_ids;
};

void fill_gather(const GatherPlan& plan, const GatherOptions& options, const GatherOutput& out);

// What there is to learn in a sample, without gathering it.
struct LabelTotals {
    std::int64_t labels = 0;     // tokens that have one
    double weight = 0;           // sum of their weights, exact below 2^29
    std::int64_t sequences = 0;  // what it has of documents that has a label of some weight
};

std::vector<LabelTotals> count_labels(Span<const Shard> shards, Span<const SampleRef> samples,
                                      Extent label_boundary, const Fim* fim = nullptr);

}  // namespace megapack
