// Plans of random steps: budgets and caps kept, groups aligned and apart, every document placed.
#include <algorithm>
#include <map>
#include <random>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "core/planning/step_plan.hpp"
#include "require.hpp"

using namespace megapack;

namespace {

void check_plan(const std::vector<std::int64_t>& lengths, const StepRules& rules,
                const StepPlan& plan) {
    const std::int64_t ranks = rules.num_ranks;
    require(plan.num_micro_batches <= ssize(lengths), "more micro batches than documents");
    std::map<std::tuple<std::int64_t, std::int64_t, std::int64_t>, std::vector<std::int64_t>>
        groups;
    for (std::int64_t i = 0; i < ssize(lengths); ++i) {
        const std::int64_t m = plan.micro_batch[i];
        require(m >= 0 && m < plan.num_micro_batches, "a document in no micro batch");
        groups[{m, plan.first_rank[i], plan.degree[i]}].push_back(lengths[i]);
    }
    std::vector<bool> used(plan.num_micro_batches, false);
    for (const std::int64_t m : plan.micro_batch) used[m] = true;
    require(std::find(used.begin(), used.end(), false) == used.end(), "an empty micro batch");
    std::vector<int> taken(ranks * plan.num_micro_batches, 0);
    for (const auto& [place, documents] : groups) {
        const auto [m, first, degree] = place;
        require(degree >= 1 && degree <= rules.max_degree && first % degree == 0 && first >= 0 &&
                    first + degree <= ranks,
                "a group that is not aligned");
        for (std::int64_t rank = first; rank < first + degree; ++rank)
            require(taken[m * ranks + rank]++ == 0, "a rank in two groups");
        std::int64_t tokens = 0;
        for (const std::int64_t length : documents) tokens += length;
        require(tokens <= degree * rules.max_tokens, "a budget exceeded");
        require(ssize(documents) <= rules.max_documents, "a cap exceeded");
    }
}

void check_costs(const std::vector<double>& costs, const std::vector<double>& caps,
                 const StepPlan& plan) {
    const std::int64_t kinds = ssize(caps);
    std::map<std::tuple<std::int64_t, std::int64_t, std::int64_t>, double> sums;
    for (std::int64_t i = 0; i < ssize(plan.degree); ++i)
        for (std::int64_t k = 0; k < kinds; ++k) {
            double& sum = sums[{plan.micro_batch[i], plan.first_rank[i], k}];
            sum += costs[i * kinds + k] / static_cast<double>(plan.degree[i]);
            require(sum <= caps[k], "a cap on costs exceeded");
        }
}

void test_random_steps() {
    std::mt19937 random(7);
    const auto below = [&](std::int64_t n) { return static_cast<std::int64_t>(random() % n); };
    for (int round = 0; round < 30; ++round) {
        StepRules rules{
            1 + below(20), 1 + below(200), 1 + below(12), 1, 0, Balance::kMicroBatches, 1};
        rules.balance = static_cast<Balance>(below(3));
        if (below(2) == 0) rules.linear_length = below(1 << 20);
        while (rules.max_degree * 2 <= rules.num_ranks && below(3) > 0) rules.max_degree *= 2;
        std::vector<std::int64_t> lengths(below(150));
        const std::int64_t longest = 1 + below(rules.max_tokens * rules.max_degree);
        for (auto& length : lengths) length = 1 + below(1 + below(longest));
        std::vector<std::int64_t> groups;
        if (below(2) == 0)
            for (std::int64_t i = 0; i < ssize(lengths); ++i) groups.push_back(below(40));
        // Costs of up to three kinds, and caps that every document keeps.
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
            require(rules.max_degree > 1 && !groups.empty(), "a sound step was refused");
            continue;  // a group that no number of ranks may hold
        }
        check_plan(lengths, rules, plan);
        check_costs(costs, caps, plan);
        if (round % 4 > 0) continue;
        const StepPlan again = plan_step(lengths, {costs, caps}, groups, rules);
        require(plan.first_rank == again.first_rank && plan.degree == again.degree &&
                    plan.micro_batch == again.micro_batch,
                "two plans of one step differ");
    }
}

// The others are in tests/planning.
void test_refusals_of_what_would_overflow() {
    const std::vector<std::pair<std::vector<std::int64_t>, StepRules>> refused = {
        {{-1}, {2, 8, 8, 2, 0, Balance::kStep, 1}},
        {std::vector<std::int64_t>(5, 1 << 27), {2, 1 << 28, 8, 1, 0, Balance::kStep, 1}},
    };
    for (const auto& step : refused)
        require(refuses([&] { plan_step(step.first, {}, {}, step.second); }),
                "a step without a meaning was planned");
}

}  // namespace

int main() {
    test_random_steps();
    test_refusals_of_what_would_overflow();
    std::puts("ok");
    return 0;
}
