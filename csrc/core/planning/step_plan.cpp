#include "core/planning/step_plan.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <utility>

#include "core/base/check.hpp"
#include "core/planning/assignment.hpp"

namespace megapack {
namespace {

constexpr std::int64_t kMostWork = std::int64_t{1} << 56;
// Upper bound of the sum of all integer costs.
constexpr std::int64_t kWorkOfAll = std::int64_t{1} << 48;
constexpr std::int64_t kMostKinds = 64;
constexpr std::int64_t kMostPlaces = std::int64_t{1} << 24;  // ranks times micro batches
// Exchanges to evaluate: more of them would cost more time than they save.
constexpr std::int64_t kExchanges = std::int64_t{1} << 18;

void check_rules(const StepRules& rules) {
    constexpr std::int64_t kMost = std::int64_t{1} << 20;
    const auto within = [](const char* name, std::int64_t value, std::int64_t low,
                           std::int64_t high) {
        check(value >= low && value <= high, name, " is ", value, "; it must be from ", low, " to ",
              high);
    };
    within("num_ranks", rules.num_ranks, 1, kMost);
    within("max_tokens_per_rank", rules.max_tokens, 1, std::int64_t{1} << 40);
    within("linear_cost_tokens", rules.linear_cost_tokens, 0, std::int64_t{1} << 28);
    within("micro_batch_multiple", rules.multiple, 1, kMost);
    check(rules.max_documents >= 1, "max_documents_per_rank is ", rules.max_documents,
          "; it must be at least 1");
    const std::int64_t degree = rules.max_context_parallel_size;
    check(degree >= 1 && (degree & (degree - 1)) == 0 && degree <= rules.num_ranks,
          "max_context_parallel_size is ", degree,
          "; it must be a power of two, at most num_ranks (", rules.num_ranks, ")");
}

void check_lengths(Span<const std::int64_t> lengths, const StepRules& rules) {
    std::int64_t work = 0;
    for (std::int64_t i = 0; i < lengths.size(); ++i) {
        const std::int64_t length = lengths[i];
        check(length >= 1, "document ", i, " has ", length, " tokens; leave it out");
        check((length - 1) / rules.max_context_parallel_size < rules.max_tokens, "document ", i,
              " has ", length, " tokens; ", rules.max_context_parallel_size,
              " ranks (max_context_parallel_size) of ", rules.max_tokens,
              " tokens (max_tokens_per_rank) hold ",
              rules.max_context_parallel_size * rules.max_tokens,
              ": raise one of them, or cut the document");
        check(length < (std::int64_t{1} << 28) && work <= kMostWork - length * length, "document ",
              i, ": squared lengths sum to more than 2^56; plan fewer documents at a time");
        work += length * length;
    }
}

// Costs of documents by kind, and their caps.
class Costs {
  public:
    Costs(Span<const std::int64_t> lengths, const GivenCosts& given, const StepRules& rules)
        : lengths_(lengths),
          given_(given.costs),
          kinds_(given.costs.empty() ? 1 : given.costs.size() / lengths.size()),
          caps_(given.caps),
          linear_cost_tokens_(rules.linear_cost_tokens),
          max_context_parallel_size_(rules.max_context_parallel_size) {
        check(kinds_ <= kMostKinds, "costs has ", kinds_, " kinds; at most ", kMostKinds,
              " are balanced at once");
        check(given.caps.empty() || given.caps.size() == kinds_, "max_costs_per_rank has ",
              given.caps.size(), " numbers; give one for each of the ", kinds_, " kinds of cost");
        for (std::int64_t k = 0; k < kinds_; ++k) check_kind(k);
    }

    std::int64_t kinds() const { return kinds_; }
    // Cost relative to a power of two near the largest one, so sums neither overflow nor vanish.
    double of(std::int64_t i, std::int64_t k) const { return std::ldexp(given(i, k), -shift_[k]); }
    std::int64_t num_caps() const { return ssize(cap_); }
    std::int64_t cap(std::int64_t k) const { return cap_[k]; }
    // Cost in units of a power of two: integers stay exact, other numbers are rounded up.
    std::int64_t amount(std::int64_t i, std::int64_t k) const {
        const double cost = given(i, k);
        const double units = std::ceil(std::ldexp(cost, exponent_[k] - shift_[k]));
        const std::int64_t rounded =
            std::max(static_cast<std::int64_t>(units), std::int64_t{cost > 0});
        // A document that fits by `fit` must fit after rounding, too.
        return std::min(rounded, cap_[k] * max_context_parallel_size_);
    }
    // Returns true if max_context_parallel_size ranks hold the documents. Compares the given costs,
    // because the units of `amount` depend on other documents.
    bool fit(Span<const std::int64_t> documents, std::int64_t k) const {
        double cost = 0;
        for (const std::int64_t i : documents) cost += given(i, k);
        return cost <= caps_[k] * static_cast<double>(max_context_parallel_size_);
    }

  private:
    double given(std::int64_t i, std::int64_t k) const {
        return given_.empty()
                   ? static_cast<double>(lengths_[i] * (linear_cost_tokens_ + lengths_[i]))
                   : given_[i * kinds_ + k];
    }

    void check_kind(std::int64_t k) {
        double largest = 0;
        for (std::int64_t i = 0; i < lengths_.size(); ++i) {
            const double cost = given(i, k);
            check(std::isfinite(cost) && cost >= 0, "document ", i, " has the cost ", cost,
                  "; it must be finite and at least 0");
            largest = std::max(largest, cost);
        }
        shift_.push_back(largest > 0 ? std::ilogb(largest) : 0);
        if (caps_.empty()) return;
        check(caps_[k] >= 0, "max_costs_per_rank of kind ", k, " is ", caps_[k],
              "; it must be at least 0");
        double sum = 0;
        for (std::int64_t i = 0; i < lengths_.size(); ++i) {
            sum += of(i, k);
            check(fit({&i, 1}, k), "document ", i, " has the cost ", given(i, k), "; ",
                  max_context_parallel_size_, " ranks (max_context_parallel_size) of ", caps_[k],
                  " (max_costs_per_rank) may have ",
                  caps_[k] * static_cast<double>(max_context_parallel_size_),
                  ": raise one of them, or leave it out");
        }
        const double cap = std::ldexp(caps_[k], -shift_[k]);
        exponent_.push_back(sum > 0 ? 40 - std::ilogb(sum) : 0);
        // The cap is rounded down and costs are rounded up, so ranks never exceed it. A cap above
        // the sum of all costs has no effect.
        cap_.push_back(cap >= sum ? std::numeric_limits<std::int64_t>::max() >> 21
                                  : static_cast<std::int64_t>(std::ldexp(cap, exponent_[k])));
    }

    Span<const std::int64_t> lengths_;
    Span<const double> given_;
    std::int64_t kinds_;
    Span<const double> caps_;
    std::int64_t linear_cost_tokens_, max_context_parallel_size_;
    std::vector<int> shift_;         // per kind
    std::vector<std::int64_t> cap_;  // per kind, if there are caps
    std::vector<int> exponent_;
};

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
    return (a + b - 1) / b;
}

// Documents of every item, and its family (see Items).
class Members {
  public:
    explicit Members(std::int64_t num_documents = 0) {
        for (auto* values : {&family, &documents_, &begin_}) values->reserve(num_documents + 1);
    }

    std::int64_t size() const { return ssize(family); }
    Span<const std::int64_t> operator[](std::int64_t item) const {
        return {documents_.data() + begin_[item], begin_[item + 1] - begin_[item]};
    }
    void add_item() {
        begin_.push_back(begin_.back());
        family.push_back(-1);
    }
    // Adds a document to the last item.
    void add(std::int64_t document) {
        documents_.push_back(document);
        ++begin_.back();
    }

    std::vector<std::int64_t> family;

  private:
    std::vector<std::int64_t> documents_, begin_ = {0};
};

// Makes an item of each document, longest first; ties: the smaller number first.
Members single_documents(Span<const std::int64_t> lengths) {
    // One number per document, because it sorts faster than a pair: lengths are below 2^28.
    std::vector<std::uint64_t> order(lengths.size());
    for (std::int64_t i = 0; i < lengths.size(); ++i)
        order[i] = static_cast<std::uint64_t>((std::int64_t{1} << 28) - lengths[i]) << 32 |
                   static_cast<std::uint64_t>(i);
    std::sort(order.begin(), order.end());
    Members members(lengths.size());
    for (const std::uint64_t key : order) {
        members.add_item();
        members.add(static_cast<std::uint32_t>(key));
    }
    return members;
}

// Makes items of the documents of each group, as many documents per item as a bin holds. If a group
// has several items, they form a family.
Members chunks_of_groups(Span<const std::int64_t> lengths, const Costs& costs,
                         const std::map<std::int64_t, std::vector<std::int64_t>>& groups,
                         const StepRules& rules) {
    Members members;
    std::int64_t num_families = 0;
    for (const auto& [group, documents] : groups) {
        const std::int64_t first = members.size();
        std::int64_t tokens = 0;
        std::vector<std::int64_t> amount(costs.num_caps());
        for (const std::int64_t i : documents) {
            tokens += lengths[i];
            bool fits = members.size() > first && tokens <= rules.max_tokens &&
                        members[members.size() - 1].size() < rules.max_documents;
            for (std::int64_t k = 0; k < ssize(amount); ++k) {
                amount[k] += costs.amount(i, k);
                fits = fits && amount[k] <= costs.cap(k);
            }
            if (!fits) {
                members.add_item();
                tokens = lengths[i];
                for (std::int64_t k = 0; k < ssize(amount); ++k) amount[k] = costs.amount(i, k);
            }
            members.add(i);
        }
        if (members.size() - first == 1) continue;
        std::fill(members.family.begin() + first, members.family.end(), num_families++);
    }
    return members;
}

// Makes one item of each group.
Members whole_groups(Span<const std::int64_t> lengths, const Costs& costs,
                     const std::map<std::int64_t, std::vector<std::int64_t>>& groups,
                     const StepRules& rules) {
    Members members;
    for (const auto& [group, documents] : groups) {
        std::int64_t tokens = 0;
        for (const std::int64_t i : documents) tokens += lengths[i];
        check((tokens - 1) / rules.max_context_parallel_size < rules.max_tokens, "group ", group,
              " has ", tokens, " tokens; ", rules.max_context_parallel_size,
              " ranks (max_context_parallel_size) of ", rules.max_tokens,
              " tokens (max_tokens_per_rank) hold ",
              rules.max_context_parallel_size * rules.max_tokens,
              ": raise one of them, or split the group");
        check(ssize(documents) <= rules.max_documents, "group ", group, " has ", documents.size(),
              " documents; a rank holds ", rules.max_documents,
              " (max_documents_per_rank): raise it, or split the group");
        for (std::int64_t k = 0; k < costs.num_caps(); ++k) {
            check(costs.fit(documents, k), "group ", group, " costs more (kind ", k, ") than ",
                  rules.max_context_parallel_size,
                  " ranks (max_context_parallel_size) may have (max_costs_per_rank): raise it, or "
                  "split the group");
        }
        members.add_item();
        for (const std::int64_t i : documents) members.add(i);
    }
    return members;
}

Items make_items(Span<const std::int64_t> lengths, const Costs& costs, const Members& members,
                 const StepRules& rules) {
    Items items;
    for (auto* values : {&items.tokens, &items.squares, &items.documents})
        values->reserve(members.size());
    items.kinds = costs.kinds();
    items.family = members.family;
    for (std::int64_t k = 0; k < costs.num_caps(); ++k) items.cap.push_back(costs.cap(k));
    for (std::int64_t item = 0; item < members.size(); ++item) {
        std::int64_t tokens = 0, squares = 0;
        for (const std::int64_t i : members[item]) {
            tokens += lengths[i];
            squares += lengths[i] * lengths[i];
        }
        items.tokens.push_back(tokens);
        items.squares.push_back(squares);
        items.documents.push_back(members[item].size());
        for (std::int64_t k = 0; k < costs.num_caps(); ++k) {
            std::int64_t amount = 0;
            for (const std::int64_t i : members[item]) amount += costs.amount(i, k);
            items.amount.push_back(
                std::min(amount, costs.cap(k) * rules.max_context_parallel_size));
        }
    }
    return items;
}

// Sets the costs of every kind, in units of the lower bound of its path: the total divided evenly
// (in a pipeline by all bins), or the most expensive item if more. So paths are comparable.
void set_costs(Items& items, const Costs& costs, const Members& members, const StepRules& rules,
               std::int64_t num_micro_batches) {
    const std::int64_t bins =
        rules.num_ranks * (rules.balance == Balance::kPipeline ? num_micro_batches : 1);
    items.unit = kWorkOfAll / bins;
    items.cost.assign(items.size() * items.kinds, 0);
    for (std::int64_t k = 0; k < items.kinds; ++k) {
        std::vector<double> cost(items.size(), 0.0);
        double sum = 0, largest = 0;
        for (std::int64_t item = 0; item < items.size(); ++item) {
            for (const std::int64_t i : members[item]) cost[item] += costs.of(i, k);
            sum += cost[item];
            largest = std::max(largest, cost[item]);
        }
        const double least =
            std::max(sum / static_cast<double>(bins),
                     largest / static_cast<double>(rules.max_context_parallel_size));
        const double scale = least > 0 ? static_cast<double>(items.unit) / least : 0;
        for (std::int64_t item = 0; item < items.size(); ++item)
            items.cost[item * items.kinds + k] = static_cast<std::int64_t>(cost[item] * scale);
    }
}

StepPlan plan_of(const Assignment& assignment, const Members& members, std::int64_t num_documents,
                 bool keep_empty) {
    StepPlan plan;
    std::vector<std::int64_t> number(assignment.num_micro_batches(), 0);
    for (const Bin& bin : assignment.bins())
        if (keep_empty || !bin.items.empty()) number[bin.micro_batch] = 1;
    plan.num_micro_batches = std::accumulate(number.begin(), number.end(), std::int64_t{0});
    if (keep_empty) plan.num_micro_batches = assignment.num_micro_batches();
    std::exclusive_scan(number.begin(), number.end(), number.begin(), std::int64_t{0});
    plan.first_rank.resize(num_documents);
    plan.degree.resize(num_documents);
    plan.micro_batch.resize(num_documents);
    for (const Bin& bin : assignment.bins())
        for (const std::int32_t item : bin.items)
            for (const std::int64_t i : members[item]) {
                plan.first_rank[i] = bin.first_rank;
                plan.degree[i] = bin.degree;
                plan.micro_batch[i] = keep_empty ? bin.micro_batch : number[bin.micro_batch];
            }
    return plan;
}

// Returns the least number of micro batches that tokens, documents and capped costs need.
std::int64_t least_micro_batches(const Items& items, const StepRules& rules) {
    // Sums every `step`-th value from the k-th on. Returns how many micro batches hold the sum if
    // each of num_ranks ranks holds `cap`.
    const auto needed = [&](const std::vector<std::int64_t>& values, std::int64_t cap,
                            std::int64_t step = 1, std::int64_t k = 0) {
        std::int64_t sum = 0;
        for (std::int64_t i = k; i < ssize(values); i += step) sum += values[i];
        return ceil_div(cap == 0 ? 0 : ceil_div(sum, cap), rules.num_ranks);
    };
    std::int64_t most = std::max(needed(items.tokens, rules.max_tokens),
                                 needed(items.documents, rules.max_documents));
    for (std::int64_t k = 0; k < ssize(items.cap); ++k)
        most = std::max(most, needed(items.amount, items.cap[k], items.kinds, k));
    return most;
}

// Returns the assignments of all items to `m` micro batches that it finds, possibly none. If every
// item fits on a single rank, it tries single ranks as well as shared documents, because groups of
// ranks may balance worse.
std::vector<Assignment> assignments(const Items& items, const StepRules& rules, std::int64_t m) {
    bool single = true, families = false;
    for (std::int64_t i = 0; i < items.size(); ++i) {
        single = single && holds(items, rules, 1, i);
        families = families || items.family[i] >= 0;
    }
    std::vector<Assignment> candidates;
    Assignment assignment(items, rules, m);
    if (single && (assignment.assign_greedily(false) || assignment.assign_greedily(true)))
        candidates.push_back(assignment);
    const bool alone = rules.max_context_parallel_size == 1;
    if (!families && (candidates.empty() || !alone) && assign_shared(assignment))
        candidates.push_back(assignment);
    if (candidates.empty() && alone && assignment.assign_best_fit())
        candidates.push_back(assignment);
    if (candidates.empty() && !families && m >= items.size()) {
        assign_apart(assignment);
        return {assignment};
    }
    for (Assignment& each : candidates)
        if (each.of_single_ranks()) each.arrange();
    return candidates;
}

}  // namespace

StepPlan plan_step(Span<const std::int64_t> lengths, const GivenCosts& given,
                   Span<const std::int64_t> groups, const StepRules& rules) {
    check_rules(rules);
    check_lengths(lengths, rules);
    if (lengths.empty()) return {};
    const Costs costs(lengths, given, rules);
    std::map<std::int64_t, std::vector<std::int64_t>> by_group;
    for (std::int64_t i = 0; i < groups.size(); ++i) by_group[groups[i]].push_back(i);
    const bool alone = rules.max_context_parallel_size == 1;
    const Members members = groups.empty() ? single_documents(lengths)
                            : alone        ? chunks_of_groups(lengths, costs, by_group, rules)
                                           : whole_groups(lengths, costs, by_group, rules);
    Items items = make_items(lengths, costs, members, rules);
    const auto rounded = [&](std::int64_t m) {
        return ceil_div(m, rules.multiple) * rules.multiple;
    };
    for (std::int64_t m = rounded(least_micro_batches(items, rules));;
         m = rounded(std::min(m + 1 + m / 16, items.size()))) {
        check(m <= kMostPlaces / rules.num_ranks, rules.num_ranks, " ranks (num_ranks) of ", m,
              " micro batches give ", m * rules.num_ranks, " places for documents; the limit is ",
              kMostPlaces, ": lower num_ranks or micro_batch_multiple, or raise ",
              "max_tokens_per_rank");
        set_costs(items, costs, members, rules, m);
        std::vector<Assignment> candidates = assignments(items, rules, m);
        if (candidates.empty()) continue;
        std::vector<std::int64_t> paths;
        for (Assignment& assignment : candidates) paths.push_back(balance(assignment, kExchanges));
        const auto best = std::min_element(paths.begin(), paths.end()) - paths.begin();
        return plan_of(candidates[best], members, lengths.size(), rules.multiple > 1);
    }
}

}  // namespace megapack
