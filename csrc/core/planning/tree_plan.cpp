// plan_trees: cut the sorted sequences into runs by dynamic programming, put the runs into bins
// (the tree of a rank in a micro batch), then move and exchange branches between bins.
#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

#include "core/base/check.hpp"
#include "core/planning/tree_search.hpp"

namespace megapack {
namespace {

constexpr std::int64_t kMostPlaces = std::int64_t{1} << 24;  // ranks times micro batches
// Moves to evaluate. More of them would cost more time than they save.
constexpr std::int64_t kMoves = std::int64_t{1} << 21;
constexpr std::int64_t kKeysPerToken = 256;  // limit of a tree's paths, per token of the cap
constexpr std::int64_t kFewTrees = 64;       // so many are searched thoroughly even if nearly full

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
    return (a + b - 1) / b;
}

// Cuts sequences into runs of at most `cap` tokens with the fewest repeated tokens: a cut before a
// sequence repeats what it shares with the one before. Among equal cuts it chooses the last, so
// that one run is full and the other one short.
std::vector<TreeRun> cut(const Forest& forest, Span<const std::int32_t> sequences,
                         std::int64_t cap) {
    const std::int64_t n = sequences.size();
    const auto common = [&](std::int64_t k) {
        return forest.common(k == 0 ? kNoSequence : sequences[k - 1], sequences[k]);
    };
    // A run i..k has begin[k + 1] - begin[i] + (what i shares with i - 1) tokens.
    std::vector<Amount> begin(n + 1);
    std::vector<std::int64_t> best(n + 1, 0), first(n + 1, 0), window;
    std::int64_t oldest = 0;  // of the window: starts in order of rising cost
    for (std::int64_t k = 0; k < n; ++k) {
        const auto cost = [&](std::int64_t i) { return best[i] + common(i).tokens; };
        begin[k + 1] = begin[k] + forest.whole(sequences[k]) - common(k);
        while (ssize(window) > oldest && cost(window.back()) >= cost(k)) window.pop_back();
        window.push_back(k);
        while ((begin[k + 1] - begin[window[oldest]] + common(window[oldest])).tokens > cap)
            ++oldest;
        first[k + 1] = window[oldest];
        best[k + 1] = cost(window[oldest]);
    }
    std::vector<TreeRun> runs;
    for (std::int64_t end = n; end > 0; end = first[end])
        runs.push_back({first[end], end, begin[end] - begin[first[end]] + common(first[end])});
    return runs;
}

// Returns the fewest tokens that trees of `cap` tokens forward: all sequences of a root share a
// prefix, which each of its trees repeats.
std::int64_t least_tokens(const Forest& forest, Span<const std::int64_t> shared, std::int64_t cap) {
    std::int64_t total = 0;
    for (std::int64_t begin = 0, end = 0; begin < forest.size(); begin = end) {
        std::int64_t tokens = forest.length(begin), prefix = tokens;
        for (end = begin + 1; end < forest.size() && shared[end] > 0; ++end) {
            tokens += forest.length(end) - shared[end];
            prefix = std::min(prefix, shared[end]);
        }
        total += tokens;
        if (tokens > cap) total += prefix * (ceil_div(tokens - prefix, cap - prefix) - 1);
    }
    return total;
}

// Refuses a tree whose paths have too many tokens: varlen attention gathers a key and a value for
// each. They are at most twice the tokens of its sequences, one path per end and per branch.
void check_paths(const Forest& forest, const std::vector<std::int32_t>& tree,
                 Span<const std::int64_t> shared, std::int64_t cap) {
    std::vector<std::int64_t> lengths;
    for (const std::int32_t sequence : tree) lengths.push_back(forest.length(sequence));
    const std::int64_t most = kKeysPerToken * cap;
    if (2 * std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}) <= most) return;
    const TreeNodes nodes = tree_nodes(lengths, shared);
    std::int64_t tokens = 0, keys = 0;
    for (std::int64_t i = 0; i < ssize(nodes.depths); ++i) {
        tokens += nodes.lengths[i];
        keys += nodes.depths[i] + nodes.lengths[i];
    }
    check(keys <= most, "a tree of ", tree.size(), " sequences has ", tokens, " tokens, and ", keys,
          " on the paths of its ", nodes.depths.size(), " nodes; the limit is ", kKeysPerToken,
          " x ", cap, ", since attention gathers keys and values along paths: lower max_depth, ",
          "the nodes on a path (1: nothing is shared), or the tokens of a tree");
}

TreePlan plan_of(const Forest& forest, const std::vector<std::vector<std::int32_t>>& trees,
                 std::int64_t num_micro_batches, std::int64_t cap) {
    TreePlan plan{num_micro_batches, {0}, {}, {}};
    for (const std::vector<std::int32_t>& tree : trees) {
        std::int64_t before = kNoSequence;
        for (const std::int32_t sequence : tree) {
            plan.sequences.push_back(sequence);
            plan.shared.push_back(forest.shared(before, sequence));
            before = sequence;
        }
        const Span<const std::int64_t> all = plan.shared;
        check_paths(forest, tree, all.subspan(plan.offsets.back(), ssize(tree)), cap);
        plan.offsets.push_back(ssize(plan.sequences));
    }
    return plan;
}

// Cuts every group into runs; plan_step assigns them.
TreePlan plan_groups(const Forest& forest, Span<const std::int64_t> groups, std::int64_t cap,
                     const TreeRules& rules) {
    std::map<std::int64_t, std::vector<std::int32_t>> members;
    for (std::int64_t k = 0; k < groups.size(); ++k)
        members[groups[k]].push_back(static_cast<std::int32_t>(k));
    std::vector<std::vector<std::int32_t>> content;
    std::vector<std::int64_t> tokens, group_of_run;
    std::vector<double> costs;
    for (const auto& [group, sequences] : members)
        for (const TreeRun& run : cut(forest, sequences, cap)) {
            content.emplace_back(sequences.begin() + run.begin, sequences.begin() + run.end);
            tokens.push_back(run.sum.tokens);
            costs.push_back(static_cast<double>(run.sum.cost));
            group_of_run.push_back(group);
        }
    const StepRules step{rules.num_ranks, cap, ssize(content), 1, 0, rules.balance, rules.multiple};
    const StepPlan plan = plan_step(tokens, {costs, {}}, group_of_run, step);
    std::vector<std::vector<std::int32_t>> trees(plan.num_micro_batches * rules.num_ranks);
    for (std::int64_t i = 0; i < ssize(content); ++i) {
        auto& tree = trees[plan.micro_batch[i] * rules.num_ranks + plan.first_rank[i]];
        tree.insert(tree.end(), content[i].begin(), content[i].end());
    }
    for (auto& tree : trees) std::sort(tree.begin(), tree.end());
    return plan_of(forest, trees, plan.num_micro_batches, cap);
}

}  // namespace

TreePlan plan_trees(Span<const std::int64_t> lengths, Span<const std::int64_t> shared,
                    Span<const std::int64_t> groups, const TreeRules& rules) {
    if (lengths.empty()) return {0, {0}, {}, {}};
    const std::int64_t cap = rules.max_tokens / rules.token_multiple * rules.token_multiple;
    const Forest forest(lengths, shared, rules.linear_cost_tokens, rules.num_ranks);
    if (!groups.empty()) return plan_groups(forest, groups, cap, rules);
    std::vector<std::int32_t> everything(lengths.size());
    std::iota(everything.begin(), everything.end(), 0);
    const std::int64_t least = least_tokens(forest, shared, cap);
    const std::int64_t longest = *std::max_element(lengths.begin(), lengths.end());
    const auto rounded = [&](std::int64_t m) {
        return ceil_div(m, rules.multiple) * rules.multiple;
    };
    for (std::int64_t m = rounded(ceil_div(ceil_div(least, cap), rules.num_ranks));;
         m = rounded(m + 1 + m / 64)) {
        check(m <= kMostPlaces / rules.num_ranks, rules.num_ranks, " ranks (num_ranks) of ", m,
              " micro batches give ", m * rules.num_ranks, " places for trees; the limit is ",
              kMostPlaces, ": lower num_ranks or micro_batch_multiple, or raise ",
              "max_tokens_per_rank");
        // With free places, smaller trees balance better.
        const std::int64_t mean = ceil_div(least, m * rules.num_ranks);
        const std::int64_t slack = std::min(mean / 16, mean / 128 + longest);
        const std::int64_t smaller = std::max(longest, mean + slack);
        std::vector<std::int64_t> targets{cap};
        if (rules.num_ranks > 1 && smaller < cap - cap / 64) targets.push_back(smaller);
        // Trees this full rarely exist in large steps.
        const bool hopeless = mean > cap - cap / 32 && m * rules.num_ranks > kFewTrees;
        const std::int64_t moves = hopeless ? kMoves / 8 : kMoves;
        std::vector<TreeSearch> found;
        for (const std::int64_t target : targets) {
            if (!found.empty() && !found[0].waits()) break;
            TreeSearch search(forest, rules, m);
            search.assign(cut(forest, everything, target), target);
            search.minimize(target, false, moves);
            if (!search.fits(cap)) continue;
            search.arrange();
            search.minimize(cap, true, kMoves / 2);
            found.push_back(std::move(search));
        }
        if (found.empty()) continue;
        const auto best = std::min_element(
            found.begin(), found.end(),
            [](const TreeSearch& a, const TreeSearch& b) { return a.objective() < b.objective(); });
        std::vector<std::vector<std::int32_t>> trees;
        for (const TreeBin& bin : best->bins()) trees.push_back(bin.members);
        return plan_of(forest, trees, m, cap);
    }
}

}  // namespace megapack
