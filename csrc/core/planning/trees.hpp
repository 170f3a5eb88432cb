// Prefix trees: sequences that share prefixes, assigned to ranks and micro batches, where each
// shared prefix is computed once.
//
//     sequences {7 8 1 2}, {7 8 3}, {7 8 3 4}
//     -> order 0 1 2, shared 0 2 3: sequence 1 begins with 2 tokens of sequence 0
//     -> nodes 7 8 | 1 2 | 3 | 4 with the parents -1 0 0 2: 6 tokens instead of 11
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/span.hpp"
#include "core/planning/step_plan.hpp"

namespace megapack {

// ---- Order (trees.cpp)

// Sequences ordered by content, then number. shared[k]: number of items that sequences order[k - 1]
// and order[k] have in common at their begin; 0 for the first.
struct SortedSequences {
    std::vector<std::int64_t> order, shared;
};

// Sequence i is items[offsets[i], offsets[i + 1]). Time: every item of a shared prefix is read once
// per sequence, and the sequences of a branch are sorted by one item.
template <typename T>
SortedSequences sort_sequences(Span<const T> items, Span<const std::int64_t> offsets);

// ---- Nodes (trees.cpp)

// Nodes in preorder. A sequence is the path to the end of its node.
struct TreeNodes {
    std::vector<std::int32_t> begins, lengths, parents, depths;
    std::vector<std::int64_t> sequences;       // position of the first sequence through the node
    std::vector<std::int32_t> sequence_nodes;  // per sequence: the node in which it ends
};

// lengths[k], shared[k]: as in SortedSequences, in tokens.
TreeNodes tree_nodes(Span<const std::int64_t> lengths, Span<const std::int64_t> shared);

// Returns the row indices of the paths from the root to the end of each of `nodes`, concatenated.
std::vector<std::int32_t> tree_paths(Span<const std::int32_t> begins,
                                     Span<const std::int32_t> lengths,
                                     Span<const std::int32_t> parents,
                                     Span<const std::int32_t> nodes);

// Lowers `shared` so that no path has more than `max_depth` nodes: sequences that would branch in a
// node of that depth each get a copy of it.
void limit_depth(Span<const std::int64_t> lengths, Span<std::int64_t> shared,
                 std::int64_t max_depth);

// ---- Plan (tree_plan.cpp)

struct TreeRules {
    std::int64_t num_ranks, max_tokens;  // per rank and micro batch
    std::int64_t linear_cost_tokens;     // as in StepRules
    Balance balance;
    std::int64_t multiple;        // the number of micro batches is a multiple of this
    std::int64_t token_multiple;  // the tokens of a tree are rounded up to this
};

// Tree b = micro batch x num_ranks + rank has the sequences [offsets[b], offsets[b + 1]), ascending
// positions in sorted order, each of which shares `shared` tokens with the one before in its tree.
struct TreePlan {
    std::int64_t num_micro_batches = 0;
    std::vector<std::int64_t> offsets, sequences, shared;
};

// Assigns sequences, given in sorted order, to trees. Minimizes micro batches; then the sum of two
// ratios: tokens of all trees to tokens of one trie, and the path of the step (see Balance) to an
// equal part of the cost of one trie for each rank. A token at depth p costs
// 2p + 1 + linear_cost_tokens, so a sequence of n tokens costs n^2 + linear_cost_tokens x n.
//
// groups: as in plan_step. Deterministic like plan_step; depends on the order of sequences only.
// Throws std::invalid_argument if the paths of a tree have more than 256 tokens for each of its
// limit: a chain of prefixes, each of the next, has a square number of them.
TreePlan plan_trees(Span<const std::int64_t> lengths, Span<const std::int64_t> shared,
                    Span<const std::int64_t> groups, const TreeRules& rules);

}  // namespace megapack
