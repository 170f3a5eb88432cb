// The documents of one step: which ranks hold each, and in which micro batch.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/span.hpp"

namespace megapack {

struct StepRules {
    std::int64_t num_ranks;
    std::int64_t max_tokens;     // of a rank in a micro batch
    std::int64_t max_documents;  // of a rank in a micro batch, those counted that it has a share of
    std::int64_t max_degree;     // ranks that share a document: a power of two, at most num_ranks
    std::int64_t linear_length;  // tokens: where attention costs as much as the linear layers; or 0
};

// Document i is shared by ranks first_rank[i] ... + degree[i] - 1 in micro batch micro_batch[i].
struct StepPlan {
    std::int64_t num_micro_batches = 0;
    std::vector<std::int64_t> first_rank, degree, micro_batch;
};

// In a micro batch, the ranks form groups of 2^k, the first a multiple of 2^k; a group shares all
// of its documents evenly. Tokens and attention (sum of squared lengths) are made equal on all
// ranks of a micro batch. As few micro batches as the tokens need; more only where no arrangement
// that was tried has room (tried are groups of at least 1, 2, 4, ... ranks).
// The same for whoever computes it: ties go to the smaller document, rank and micro batch.
// Throws std::invalid_argument for rules without a meaning and for a document without tokens or
// longer than max_degree * max_tokens.
StepPlan plan_step(Span<const std::int64_t> lengths, const StepRules& rules);

}  // namespace megapack
