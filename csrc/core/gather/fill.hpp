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

// How many tokens of each sample have a label: the sum of its loss mask, without gathering it.
std::vector<std::int64_t> count_labels(Span<const Shard> shards, Span<const SampleRef> samples,
                                       Extent label_boundary);

}  // namespace megapack
