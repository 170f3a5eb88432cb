// Assignment of the documents of a step to ranks and micro batches.
//
//     lengths {5, 3, 4}, 2 ranks of 8 tokens  ->  1 micro batch, first_rank {0, 1, 1}
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/span.hpp"

namespace megapack {

// When ranks wait for each other, which determines what to minimize. The work of a rank is the
// largest of its costs, each as a share of the cost of all ranks.
enum class Balance {
    kMicroBatches,  // after every micro batch: sum over micro batches of the busiest rank's work
    kStep,          // once per step: the busiest rank of the step
    kPipeline,      // micro batches form a pipeline: the largest (rank, micro batch)
};

struct StepRules {
    std::int64_t num_ranks;
    std::int64_t max_tokens;     // per rank and micro batch
    std::int64_t max_documents;  // per rank and micro batch, including shared ones
    // Most ranks that share a document: a power of two, at most num_ranks.
    std::int64_t max_context_parallel_size;
    // Length at which attention costs as much as the linear layers; 0: only attention counts.
    std::int64_t linear_cost_tokens;
    Balance balance;
    std::int64_t multiple;  // the number of micro batches is a multiple of this
};

// Ranks [first_rank[i], first_rank[i] + degree[i]) share document i in micro batch micro_batch[i].
struct StepPlan {
    std::int64_t num_micro_batches = 0;
    std::vector<std::int64_t> first_rank, degree, micro_batch;
};

// costs[i * kinds + k]: cost of document i of kind k, not negative; empty: one kind,
// length * (linear_cost_tokens + length). caps[k]: limit per rank and micro batch; empty: none.
struct GivenCosts {
    Span<const double> costs, caps;
};

// Assigns the documents of a step to the fewest micro batches for which it finds an assignment,
// starting with the number that tokens, documents and capped costs need. No (rank, micro batch) is
// empty if there are documents for all. With several kinds of cost, minimizes the longest critical
// path, each measured in units of its lower bound.
//
// groups: a number per document. One rank holds all documents with the same number, in one micro
// batch if they fit; with max_context_parallel_size above 1, as many ranks as necessary share them
// in one micro batch. Empty: no groups.
//
// Deterministic on every machine: only integers are compared, ties go to the smaller document, rank
// and micro batch, and the search evaluates a fixed number of exchanges. Throws
// std::invalid_argument for invalid arguments, and for a document or group that
// max_context_parallel_size ranks cannot hold.
StepPlan plan_step(Span<const std::int64_t> lengths, const GivenCosts& costs,
                   Span<const std::int64_t> groups, const StepRules& rules);

}  // namespace megapack
