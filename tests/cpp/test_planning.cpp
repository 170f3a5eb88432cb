// Plans of random steps: no access outside arrays, and the same plan twice. tests/planning checks
// the laws of plans.
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "core/planning/step_plan.hpp"
#include "core/planning/trees.hpp"
#include "require.hpp"

using namespace megapack;

namespace {

void test_random_steps() {
    std::mt19937 random(7);
    const auto below = [&](std::int64_t n) { return static_cast<std::int64_t>(random() % n); };
    for (int round = 0; round < 30; ++round) {
        StepRules rules{
            1 + below(20), 1 + below(200), 1 + below(12), 1, 0, Balance::kMicroBatches, 1};
        rules.balance = static_cast<Balance>(below(3));
        if (below(2) == 0) rules.linear_cost_tokens = below(1 << 20);
        while (rules.max_context_parallel_size * 2 <= rules.num_ranks && below(3) > 0)
            rules.max_context_parallel_size *= 2;
        std::vector<std::int64_t> lengths(below(150));
        const std::int64_t longest = 1 + below(rules.max_tokens * rules.max_context_parallel_size);
        for (auto& length : lengths) length = 1 + below(1 + below(longest));
        std::vector<std::int64_t> groups;
        if (below(2) == 0)
            for (std::int64_t i = 0; i < ssize(lengths); ++i) groups.push_back(below(40));
        // Costs of up to three kinds, and caps that no document exceeds.
        std::vector<double> costs, caps;
        const std::int64_t kinds = below(4);
        for (std::int64_t i = 0; i < ssize(lengths) * kinds; ++i)
            costs.push_back(static_cast<double>(below(9)) / 4);
        if (below(2) == 0)
            for (std::int64_t k = 0; k < kinds; ++k)
                caps.push_back(2 + static_cast<double>(below(9)));
        if (lengths.empty()) costs.clear();
        StepPlan plan;
        try {
            plan = plan_step(lengths, {costs, caps}, groups, rules);
        } catch (const std::invalid_argument&) {
            require(rules.max_context_parallel_size > 1 && !groups.empty(),
                    "a valid step was refused");
            continue;  // no number of ranks can hold some group
        }
        require(ssize(plan.micro_batch) == ssize(lengths), "a document in no micro batch");
        const StepPlan again = plan_step(lengths, {costs, caps}, groups, rules);
        require(plan.first_rank == again.first_rank && plan.degree == again.degree &&
                    plan.micro_batch == again.micro_batch,
                "two plans of one step differ");
    }
}

void test_random_trees() {
    std::mt19937 random(11);
    const auto below = [&](std::int64_t n) { return static_cast<std::int64_t>(random() % n); };
    for (int round = 0; round < 12; ++round) {
        std::vector<std::int32_t> items;
        std::vector<std::int64_t> offsets{0}, lengths, groups;
        const std::int64_t symbols = 1 + below(3), longest = 1 + below(12);
        for (std::int64_t i = below(60); i > 0; --i) {
            for (std::int64_t n = 1 + below(longest); n > 0; --n)
                items.push_back(static_cast<std::int32_t>(below(symbols)));
            offsets.push_back(ssize(items));
            if (round % 3 == 0) groups.push_back(below(5));
        }
        SortedSequences sorted = sort_sequences<std::int32_t>(items, offsets);
        for (const std::int64_t i : sorted.order) lengths.push_back(offsets[i + 1] - offsets[i]);
        const std::int64_t depth = below(4);
        if (depth > 0) limit_depth(lengths, sorted.shared, depth);
        const TreeRules rules{
            1 + below(5), longest + below(50), below(99), static_cast<Balance>(below(3)), 1, 1};
        const TreePlan plan = plan_trees(lengths, sorted.shared, groups, rules);
        require(ssize(plan.sequences) == ssize(lengths), "a sequence in no tree");
        for (std::int64_t b = 0; b + 1 < ssize(plan.offsets); ++b) {
            const std::int64_t begin = plan.offsets[b], count = plan.offsets[b + 1] - begin;
            std::vector<std::int64_t> own;
            std::int64_t tokens = 0;
            for (std::int64_t k = begin; k < begin + count; ++k) {
                own.push_back(lengths[plan.sequences[k]]);
                tokens += own.back() - plan.shared[k];
            }
            const TreeNodes nodes = tree_nodes(own, {plan.shared.data() + begin, count});
            const auto paths =
                tree_paths(nodes.begins, nodes.lengths, nodes.parents, nodes.sequence_nodes);
            require(tokens <= rules.max_tokens, "a tree exceeds the cap");
            require(ssize(paths) == std::accumulate(own.begin(), own.end(), std::int64_t{0}),
                    "paths are not the sequences");
        }
        const TreePlan again = plan_trees(lengths, sorted.shared, groups, rules);
        require(plan.sequences == again.sequences && plan.offsets == again.offsets,
                "two plans of one step differ");
    }
}

// tests/planning has all other refusals.
void test_refused_overflow() {
    const std::vector<std::pair<std::vector<std::int64_t>, StepRules>> refused = {
        {{-1}, {2, 8, 8, 2, 0, Balance::kStep, 1}},
        {std::vector<std::int64_t>(5, 1 << 27), {2, 1 << 28, 8, 1, 0, Balance::kStep, 1}},
    };
    for (const auto& step : refused)
        require(refuses([&] { plan_step(step.first, {}, {}, step.second); }),
                "an invalid step was planned");
}

}  // namespace

int main() {
    return pass({test_random_steps, test_random_trees, test_refused_overflow});
}
