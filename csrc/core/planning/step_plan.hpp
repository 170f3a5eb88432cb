// The documents of one step: which ranks hold each, and in which micro batch.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/span.hpp"

namespace megapack {

// Where ranks wait for each other, which says what is made small. The work of a rank is the largest
// of its costs, each as a share of what all ranks have.
enum class Balance {
    kMicroBatches,  // after every micro batch: the sum over micro batches of the busiest rank
    kStep,          // once a step: the busiest rank of the step
    kPipeline,      // micro batches follow each other in a pipeline: the largest of them all
};

struct StepRules {
    std::int64_t num_ranks;
    std::int64_t max_tokens;     // of a rank in a micro batch
    std::int64_t max_documents;  // of a rank in a micro batch, those counted that it has a share of
    std::int64_t max_context_parallel_size;  // ranks that share a document: a power of two, at most
                                             // num_ranks
    std::int64_t
        linear_cost_tokens;  // tokens: where attention costs as much as the linear layers; or 0
    Balance balance;
    std::int64_t multiple;  // the number of micro batches is a multiple of this
};

// Document i is shared by ranks first_rank[i] ... + degree[i] - 1 in micro batch micro_batch[i].
struct StepPlan {
    std::int64_t num_micro_batches = 0;
    std::vector<std::int64_t> first_rank, degree, micro_batch;
};

// What documents cost: of document i and kind k at i * kinds + k, not negative. None: one kind,
// length * (linear_cost_tokens + length). `caps`: per kind, of a rank in a micro batch; or none.
struct GivenCosts {
    Span<const double> costs, caps;
};

// Deals the documents of a step. As few micro batches as an arrangement is found for, beginning
// with what tokens, documents and capped costs need; no (rank, micro batch) is empty while there
// are documents for all. Of several kinds of cost the longest path counts, each in units of the
// shortest that it could be.
//
// Groups: a number per document. Documents of one number are held by one rank, and in one micro
// batch where they fit into one; with max_context_parallel_size above 1 always in one micro batch,
// by as many ranks as hold them all. None: every document is its own group.
//
// The same for whoever computes it: whole numbers alone are compared, ties go to the smaller
// document, rank and micro batch, and the search ends after a number of exchanges looked at.
// Throws std::invalid_argument for arguments without a meaning, and for a document or group that
// max_context_parallel_size ranks cannot hold.
StepPlan plan_step(Span<const std::int64_t> lengths, const GivenCosts& costs,
                   Span<const std::int64_t> groups, const StepRules& rules);

}  // namespace megapack
