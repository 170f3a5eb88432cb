#include "core/planning/trees.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "core/base/check.hpp"

namespace megapack {

// ---- Order

template <typename T>
SortedSequences sort_sequences(Span<const T> items, Span<const std::int64_t> offsets) {
    struct Range {
        std::int64_t begin, end, depth;  // of `order`: sequences that share their first items
    };
    const std::int64_t n = offsets.size() - 1;
    SortedSequences sorted;
    sorted.order.resize(n);
    sorted.shared.assign(n, 0);
    std::vector<std::int64_t>& order = sorted.order;
    std::iota(order.begin(), order.end(), 0);
    const auto size = [&](std::int64_t i) { return offsets[i + 1] - offsets[i]; };
    std::vector<std::pair<T, std::int64_t>> keys;
    std::vector<Range> open;
    if (n > 1) open.push_back({0, n, 0});
    while (!open.empty()) {
        auto [begin, end, depth] = open.back();
        open.pop_back();
        // Skip what all of them share: compare each with the first.
        const T* first = items.data() + offsets[order[begin]];
        std::int64_t common = size(order[begin]);
        for (std::int64_t k = begin + 1; k < end; ++k) {
            const T* other = items.data() + offsets[order[k]];
            common = std::min(common, size(order[k]));
            common = std::mismatch(first + depth, first + common, other + depth).first - first;
        }
        // Sequences that end here come first, by number; the others follow, ordered by their next
        // item and number.
        const auto ends = [&](std::int64_t i) { return size(i) == common; };
        const auto middle =
            std::partition(order.begin() + begin, order.begin() + end, ends) - order.begin();
        std::sort(order.begin() + begin, order.begin() + middle);
        keys.clear();
        for (std::int64_t k = middle; k < end; ++k)
            keys.push_back({items[offsets[order[k]] + common], order[k]});
        std::sort(keys.begin(), keys.end());
        for (std::int64_t k = begin + 1; k < end; ++k) sorted.shared[k] = common;
        for (std::int64_t k = middle, run = middle; k < end; ++k) {
            order[k] = keys[k - middle].second;
            if (keys[k - middle].first != keys[run - middle].first) run = k;
            const bool last = k + 1 == end || keys[k + 1 - middle].first != keys[k - middle].first;
            if (last && k > run) open.push_back({run, k + 1, common + 1});
        }
    }
    return sorted;
}

template SortedSequences sort_sequences(Span<const std::uint16_t>, Span<const std::int64_t>);
template SortedSequences sort_sequences(Span<const std::int32_t>, Span<const std::int64_t>);
template SortedSequences sort_sequences(Span<const std::int64_t>, Span<const std::int64_t>);

// ---- Nodes

namespace {

// Sequence k adds the tokens [shared, length) to the row. The sequences of `open` form the path of
// the previous sequence: each owns the tokens up to the depth at which the next one begins.
// Calls visit(k, owner) for every sequence: `owner` holds the token before its first new token.
template <typename Visit>
void for_each_branch(Span<const std::int64_t> lengths, Span<const std::int64_t> shared,
                     const Visit& visit) {
    std::vector<std::int64_t> open;
    for (std::int64_t k = 0; k < lengths.size(); ++k) {
        while (!open.empty() && shared[open.back()] >= shared[k]) open.pop_back();
        visit(k, open.empty() ? -1 : open.back());
        if (lengths[k] > shared[k]) open.push_back(k);
    }
}

}  // namespace

TreeNodes tree_nodes(Span<const std::int64_t> lengths, Span<const std::int64_t> shared) {
    // Depths at which nodes end: (sequence that adds the tokens, depth).
    std::vector<std::pair<std::int64_t, std::int64_t>> ends;
    for_each_branch(lengths, shared, [&](std::int64_t k, std::int64_t owner) {
        if (owner >= 0) ends.push_back({owner, shared[k]});
        if (lengths[k] > shared[k]) ends.push_back({k, lengths[k]});
    });
    std::sort(ends.begin(), ends.end());
    ends.erase(std::unique(ends.begin(), ends.end()), ends.end());

    TreeNodes nodes;
    std::vector<std::int32_t> open;  // the path of the previous sequence
    std::int64_t row = 0, at = 0;
    const auto end_of = [&](std::int32_t node) { return nodes.depths[node] + nodes.lengths[node]; };
    for (std::int64_t k = 0; k < lengths.size(); ++k) {
        while (!open.empty() && end_of(open.back()) > shared[k]) open.pop_back();
        for (std::int64_t depth = shared[k]; at < ssize(ends) && ends[at].first == k; ++at) {
            const auto node = static_cast<std::int32_t>(nodes.begins.size());
            nodes.begins.push_back(static_cast<std::int32_t>(row));
            nodes.lengths.push_back(static_cast<std::int32_t>(ends[at].second - depth));
            nodes.parents.push_back(open.empty() ? -1 : open.back());
            nodes.depths.push_back(static_cast<std::int32_t>(depth));
            nodes.sequences.push_back(k);
            open.push_back(node);
            row += ends[at].second - depth;
            depth = ends[at].second;
        }
        nodes.sequence_nodes.push_back(open.back());
    }
    return nodes;
}

std::vector<std::int32_t> tree_paths(Span<const std::int32_t> begins,
                                     Span<const std::int32_t> lengths,
                                     Span<const std::int32_t> parents,
                                     Span<const std::int32_t> nodes) {
    std::vector<std::int64_t> ends;  // depth after each node
    for (std::int64_t i = 0; i < begins.size(); ++i) {
        check(parents[i] >= -1 && parents[i] < i && lengths[i] >= 0, "node ", i, " has the parent ",
              parents[i], " and ", lengths[i], " tokens; parents must precede children");
        ends.push_back(lengths[i] + (parents[i] < 0 ? 0 : ends[parents[i]]));
    }
    std::int64_t total = 0;
    for (const std::int32_t node : nodes) {
        check(node >= 0 && node < begins.size(), "a sequence ends in node ", node,
              "; the tree has ", begins.size(), " nodes");
        total += ends[node];
    }
    std::vector<std::int32_t> paths(total);
    std::int64_t at = 0;
    for (const std::int32_t node : nodes) {
        at += ends[node];
        std::int32_t* out = paths.data() + at;  // from the last token to the root
        for (std::int32_t i = node; i >= 0; i = parents[i]) {
            out -= lengths[i];
            std::iota(out, out + lengths[i], begins[i]);
        }
    }
    return paths;
}

void limit_depth(Span<const std::int64_t> lengths, Span<std::int64_t> shared,
                 std::int64_t max_depth) {
    const TreeNodes nodes = tree_nodes(lengths, shared);
    // Level of a node, and the node of level max_depth on its path.
    std::vector<std::int64_t> level, limit;
    for (std::int64_t i = 0; i < ssize(nodes.parents); ++i) {
        const std::int32_t parent = nodes.parents[i];
        level.push_back(parent < 0 ? 1 : level[parent] + 1);
        limit.push_back(level[i] <= max_depth ? (level[i] == max_depth ? i : -1) : limit[parent]);
    }
    for (std::int64_t k = 1; k < lengths.size(); ++k) {
        const std::int64_t here = limit[nodes.sequence_nodes[k]];
        const bool identical = lengths[k] == shared[k] && lengths[k - 1] == shared[k];
        if (here >= 0 && here == limit[nodes.sequence_nodes[k - 1]] && !identical)
            shared[k] = nodes.depths[here];
    }
}

}  // namespace megapack
