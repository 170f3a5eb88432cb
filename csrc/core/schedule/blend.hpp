// Source of every sample of a blended bucket, in closed form at any position and for any number of
// sources.
//
//     Blend({1, 3}).range(0, 4)  ->  one sample of source 0 and three of source 1
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/base/span.hpp"

namespace megapack {

// An endless sequence of sources, source i with a share weights[i] / sum(weights) of it.
//
// The sources are the leaves of a Huffman tree of their weights. Of the first m positions that
// reach an inner node, light(m) = floor(m * a + 1/2 - 2^-64) go to its lighter child and all others
// to the heavier one; a is the lighter child's share of the node in units of 2^-64. A walk along
// one path of the tree yields the source of a position, its rank among the positions of that
// source, and how often a source was taken before a position.
//
// The bound: |taken_i(n) - n * weights[i] / sum(weights)| < 1.681 for every i and n <= 2^53.
// Let A_0 = weights[i] and A_1, ..., A_d = sum(weights) be the weights of the leaf and the nodes
// above it. Rounding at A_j moves its child's count by e_j, |e_j| <= 1/2 + 2^-65 n <= 1/2 + 2^-12,
// and reaches the leaf times A_0 / A_(j-1), so the error is at most the sum over j = 1 ... d of
// |e_j| A_0 / A_(j-1). In a Huffman tree the sibling of A_j is at least as heavy as each child of
// A_j (those two were the lightest nodes when they were joined), so A_(j+1) >= A_j + A_(j-1): with
// A_0 and A_1 >= A_0 these are at least A_0 times the Fibonacci numbers 1, 1, 2, 3, 5, ..., whose
// reciprocals sum to 3.35989. Hence 3.35989 * (1/2 + 2^-12) < 1.681.
//
// Depth: that growth makes a path no longer than log(sum(weights) / weights[i]) / log(1.618) + 2,
// and the mean depth over positions is at most the entropy of the weights + 1, that is, at most
// log2(sources) + 1. Nothing grows with the positions.
class Blend {
  public:
    // Weights are whole numbers that sum to at least 1 and at most 2^62. Weight 0: never taken.
    explicit Blend(Span<const std::int64_t> weights);

    static constexpr std::int64_t kMaxPosition = std::int64_t{1} << 53;

    const std::vector<std::int64_t>& weights() const { return weights_; }

    // Positions of one source in a range; their ranks are first_rank, first_rank + 1, ...
    struct Run {
        std::int32_t source;
        std::int64_t first_rank;
        std::int64_t count;
    };
    // Positions [begin, end) by source. Run r has the next runs[r].count elements of `places`,
    // which are relative to begin and ascend within a run.
    struct Range {
        std::vector<Run> runs;
        std::vector<std::int32_t> places;
    };
    Range range(std::int64_t begin, std::int64_t end) const;

    // Count how often every source, or one, was taken at positions [0, end).
    std::vector<std::int64_t> taken(std::int64_t end) const;
    std::int64_t taken_of(std::int32_t source, std::int64_t end) const;

  private:
    struct Node {
        std::uint64_t light_share = 0;  // of the node's weight, in units of 2^-64
        std::int32_t light = 0;         // children: sources, then inner nodes + num_sources
        std::int32_t heavy = 0;
    };
    const Node& inner(std::int32_t node) const { return nodes_[node - num_sources_]; }
    bool is_inner(std::int32_t node) const { return node >= num_sources_; }

    std::vector<std::int64_t> weights_;
    std::int64_t num_sources_;
    std::vector<Node> nodes_;  // children before their parent; the root is last
    std::vector<std::int32_t> parent_;
};

}  // namespace megapack
