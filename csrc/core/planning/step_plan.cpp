#include "core/planning/step_plan.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <optional>

#include "core/base/check.hpp"
#include "core/planning/balance.hpp"
#include "core/planning/sharing.hpp"

namespace megapack {
namespace {

constexpr std::int64_t kMostWork = std::int64_t{1} << 56;
constexpr std::int64_t kSumOfCosts = std::int64_t{1} << 48;
// Exchanges that are looked at: what is left to gain after these costs more time than it saves.
constexpr std::int64_t kLooks = std::int64_t{1} << 19;

void check_rules(const StepRules& rules) {
    check(rules.num_ranks >= 1, "num_ranks is ", rules.num_ranks, "; at least 1 is needed");
    check(rules.max_tokens >= 1, "max_tokens_per_rank is ", rules.max_tokens,
          "; at least 1 is needed");
    check(rules.max_documents >= 1, "max_documents_per_rank is ", rules.max_documents,
          "; at least 1 is needed");
    check(rules.linear_length >= 0 && rules.linear_length <= std::int64_t{1} << 28,
          "linear_length is ", rules.linear_length, "; it must be from 0 to 2^28 tokens");
    const std::int64_t degree = rules.max_degree;
    check(degree >= 1 && (degree & (degree - 1)) == 0 && degree <= rules.num_ranks,
          "max_degree is ", degree, "; it must be a power of two, at most num_ranks (",
          rules.num_ranks, ")");
    check(rules.multiple >= 1, "micro_batch_multiple is ", rules.multiple,
          "; at least 1 is needed");
}

// Tokens of all documents.
std::int64_t check_lengths(Span<const std::int64_t> lengths, const StepRules& rules) {
    std::int64_t tokens = 0, work = 0;
    for (std::int64_t i = 0; i < lengths.size(); ++i) {
        const std::int64_t length = lengths[i];
        check(length >= 1, "document ", i, " has ", length, " tokens; leave it out");
        check((length - 1) / rules.max_degree < rules.max_tokens, "document ", i, " has ", length,
              " tokens; ", rules.max_degree, " ranks (max_degree) of ", rules.max_tokens,
              " tokens (max_tokens_per_rank) hold ", rules.max_degree * rules.max_tokens,
              ": raise one of them, or cut the document");
        check(length < (std::int64_t{1} << 28) && work <= kMostWork - length * length, "document ",
              i, ": squared lengths sum to more than 2^56; plan fewer documents at a time");
        tokens += length;
        work += length * length;
    }
    return tokens;
}

// Ties: the smaller document first. One number for both sorts in half the time of a pair.
std::vector<Document> longest_first(Span<const std::int64_t> lengths) {
    constexpr std::int64_t kIdBits = 35, kLastId = (std::int64_t{1} << kIdBits) - 1;
    check(lengths.size() <= kLastId, lengths.size(), " documents; plan fewer at a time");
    std::vector<std::int64_t> keys(lengths.size());
    for (std::int64_t i = 0; i < lengths.size(); ++i)
        keys[i] = lengths[i] << kIdBits | (kLastId - i);
    std::sort(keys.begin(), keys.end(), std::greater<>());
    std::vector<Document> documents;
    documents.reserve(keys.size());
    for (const std::int64_t key : keys)
        documents.push_back({key >> kIdBits, kLastId - (key & kLastId)});
    return documents;
}

// How many of the documents count as long: the longest, with `share` of the tokens, and all that
// one rank cannot hold.
std::int64_t num_long(const std::vector<Document>& documents, std::int64_t share,
                      std::int64_t max_tokens) {
    std::int64_t count = 0;
    for (std::int64_t tokens = 0; count < ssize(documents); ++count) {
        if (documents[count].length <= max_tokens && tokens >= share) break;
        tokens += documents[count].length;
    }
    return count;
}

// The documents of every item: those of a group together, as many as a bin holds.
std::vector<std::vector<std::int64_t>> members_of(Span<const std::int64_t> lengths,
                                                  const std::vector<Document>& documents,
                                                  Span<const std::int64_t> groups,
                                                  const StepRules& rules,
                                                  std::vector<std::int64_t>& family) {
    std::vector<std::vector<std::int64_t>> members;
    if (groups.empty()) {
        for (const Document& document : documents) members.push_back({document.id});
        family.assign(members.size(), -1);
        return members;
    }
    std::map<std::int64_t, std::vector<std::int64_t>> by_group;
    for (std::int64_t i = 0; i < lengths.size(); ++i) by_group[groups[i]].push_back(i);
    std::int64_t num_families = 0;
    for (const auto& [group, documents] : by_group) {
        const std::int64_t first = ssize(members);
        std::int64_t tokens = rules.max_tokens;
        for (const std::int64_t i : documents) {
            if (tokens + lengths[i] > rules.max_tokens || ssize(members) == first ||
                ssize(members.back()) == rules.max_documents) {
                members.emplace_back();
                tokens = 0;
            }
            members.back().push_back(i);
            tokens += lengths[i];
        }
        const bool chunks = ssize(members) - first > 1;
        family.resize(members.size(), chunks ? num_families : -1);
        num_families += chunks;
    }
    return members;
}

Items make_items(Span<const std::int64_t> lengths, Span<const double> costs,
                 const std::vector<std::vector<std::int64_t>>& members,
                 std::vector<std::int64_t> family, std::int64_t linear_length) {
    Items items;
    items.kinds = costs.empty() ? 1 : costs.size() / lengths.size();
    const auto cost_of = [&](std::int64_t i, std::int64_t k) {
        return costs.empty() ? static_cast<double>(lengths[i] * (linear_length + lengths[i]))
                             : costs[i * items.kinds + k];
    };
    std::vector<double> scale(items.kinds);
    for (std::int64_t k = 0; k < items.kinds; ++k) {
        double sum = 0;
        for (std::int64_t i = 0; i < lengths.size(); ++i) {
            const double cost = cost_of(i, k);
            check(std::isfinite(cost) && cost >= 0, "document ", i, " has the cost ", cost,
                  "; it must be a number from 0 on");
            sum += cost;
        }
        check(std::isfinite(sum), "the costs sum to ", sum, "; give them in a larger unit");
        scale[k] = sum > 0 ? static_cast<double>(kSumOfCosts) / sum : 0;
    }
    items.family = std::move(family);
    for (const std::vector<std::int64_t>& documents : members) {
        std::int64_t tokens = 0;
        for (const std::int64_t i : documents) tokens += lengths[i];
        items.tokens.push_back(tokens);
        items.documents.push_back(ssize(documents));
        for (std::int64_t k = 0; k < items.kinds; ++k) {
            std::int64_t cost = 0;
            for (const std::int64_t i : documents)
                cost += static_cast<std::int64_t>(cost_of(i, k) * scale[k]);
            items.cost.push_back(cost);
        }
    }
    return items;
}

// Documents shared by ranks (or, where ranks are nearly full, by sums of lengths that fit exactly).
std::optional<std::vector<Bin>> shared_bins(const std::vector<Document>& documents,
                                            std::int64_t num_tokens, std::int64_t micro_batches,
                                            const StepRules& rules) {
    const std::int64_t bins = micro_batches * rules.num_ranks,
                       mean = (num_tokens + bins - 1) / bins;
    // What cannot be filled with a quarter of the tokens may be with all of them.
    for (const std::int64_t share : {num_tokens - num_tokens / 4, std::int64_t{0}}) {
        for (std::int64_t least = 1; least <= rules.max_degree; least *= 2) {
            Groups groups(rules, micro_batches, mean, ssize(documents));
            const std::int64_t count = num_long(documents, share, rules.max_tokens);
            if (!deal_shared(groups, documents, count, least)) continue;
            std::vector<Bin> found(groups.size());
            for (std::int64_t g = 0; g < groups.size(); ++g) {
                found[g].micro_batch = groups[g].micro_batch;
                found[g].first_rank = groups[g].first_rank;
                found[g].degree = groups[g].degree;
            }
            for (std::int64_t i = 0; i < ssize(documents); ++i)
                found[groups.group_of(documents[i].id)].items.push_back(
                    static_cast<std::int32_t>(i));
            return found;
        }
    }
    return std::nullopt;
}

StepPlan plan_of(const Dealing& dealing, const std::vector<std::vector<std::int64_t>>& members,
                 std::int64_t num_documents, bool keep_empty) {
    StepPlan plan;
    std::vector<std::int64_t> number(dealing.num_micro_batches(), 0);
    for (const Bin& bin : dealing.bins())
        if (keep_empty || !bin.items.empty()) number[bin.micro_batch] = 1;
    plan.num_micro_batches = std::accumulate(number.begin(), number.end(), std::int64_t{0});
    std::exclusive_scan(number.begin(), number.end(), number.begin(), std::int64_t{0});
    plan.first_rank.resize(num_documents);
    plan.degree.resize(num_documents);
    plan.micro_batch.resize(num_documents);
    for (const Bin& bin : dealing.bins())
        for (const std::int32_t item : bin.items)
            for (const std::int64_t i : members[item]) {
                plan.first_rank[i] = bin.first_rank;
                plan.degree[i] = bin.degree;
                plan.micro_batch[i] = number[bin.micro_batch];
            }
    return plan;
}

}  // namespace

StepPlan plan_step(Span<const std::int64_t> lengths, Span<const double> costs,
                   Span<const std::int64_t> groups, const StepRules& rules) {
    check_rules(rules);
    check(groups.empty() || rules.max_degree == 1, "max_degree is ", rules.max_degree,
          "; documents that stay together in groups are not shared by ranks: let it be 1");
    const std::int64_t num_tokens = check_lengths(lengths, rules);
    if (lengths.empty()) return {};
    const std::vector<Document> documents = longest_first(lengths);
    std::vector<std::int64_t> family;
    const auto members = members_of(lengths, documents, groups, rules, family);
    const Items items = make_items(lengths, costs, members, std::move(family), rules.linear_length);
    const auto ceil_div = [](std::int64_t a, std::int64_t b) { return (a + b - 1) / b; };
    const auto rounded = [&](std::int64_t m) {
        return ceil_div(m, rules.multiple) * rules.multiple;
    };
    const std::int64_t by_tokens =
        ceil_div(ceil_div(num_tokens, rules.max_tokens), rules.num_ranks);
    for (std::int64_t m = rounded(by_tokens);;
         m = rounded(std::min(m + 1 + m / 16, items.size()))) {
        Dealing dealing(items, rules, m);
        const auto take_shared = [&] {
            auto bins = shared_bins(documents, num_tokens, m, rules);
            if (bins) dealing.take(*std::move(bins));
            return bins.has_value();
        };
        const bool alone = rules.max_degree == 1;
        const bool dealt =
            (alone && (dealing.deal_dearest_first(false) || dealing.deal_dearest_first(true))) ||
            (groups.empty() && take_shared()) || (alone && dealing.deal_best_fit());
        if (!dealt) continue;
        if (alone) dealing.arrange();
        dealing.improve(kLooks);
        return plan_of(dealing, members, lengths.size(), rules.multiple > 1);
    }
}

}  // namespace megapack
