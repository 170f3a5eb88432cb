#include "core/planning/assignment.hpp"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <set>
#include <tuple>
#include <utility>

namespace megapack {
namespace {

constexpr std::int64_t kNone = -1;

using Entry = std::pair<std::int64_t, std::int64_t>;  // the key, and a bin or a rank

}  // namespace

std::int64_t Items::largest_cost(std::int64_t item) const {
    const auto first = cost.begin() + item * kinds;
    return *std::max_element(first, first + kinds);
}

bool holds(const Items& items, const StepRules& rules, std::int64_t degree, std::int64_t item) {
    if (items.tokens[item] > degree * rules.max_tokens) return false;
    for (std::int64_t k = 0; k < ssize(items.cap); ++k)
        if (items.amount[item * items.kinds + k] > degree * items.cap[k]) return false;
    return true;
}

// ---- Contents of bins

void Assignment::open_bins() {
    std::vector<Bin> bins;
    for (std::int64_t m = 0; m < num_micro_batches_; ++m)
        for (std::int64_t r = 0; r < rules_.num_ranks; ++r) bins.push_back({m, r, 1});
    hold(std::move(bins));
}

void Assignment::take(std::vector<Bin> bins) {
    hold(std::move(bins));
    fill_empty_bins();
}

void Assignment::hold(std::vector<Bin> bins) {
    bins_ = std::move(bins);
    cost_.assign(bins_.size() * items_.kinds, 0);
    amount_.assign(bins_.size() * items_.cap.size(), 0);
    for (std::int64_t b = 0; b < num_bins(); ++b) {
        bins_[b].tokens = bins_[b].documents = 0;
        for (const std::int32_t item : bins_[b].items) count(item, b, 1);
    }
}

void Assignment::count(std::int64_t item, std::int64_t b, std::int64_t sign) {
    bins_[b].tokens += sign * items_.tokens[item];
    bins_[b].documents += sign * items_.documents[item];
    for (std::int64_t k = 0; k < items_.kinds; ++k)
        cost_[b * items_.kinds + k] += sign * items_.cost[item * items_.kinds + k];
    for (std::int64_t k = 0; k < ssize(items_.cap); ++k)
        amount_[b * items_.kinds + k] += sign * items_.amount[item * items_.kinds + k];
}

void Assignment::open_bin(Bin bin) {
    bins_.push_back(std::move(bin));
    cost_.resize(bins_.size() * items_.kinds, 0);
    amount_.resize(bins_.size() * items_.cap.size(), 0);
}

void Assignment::put(std::int64_t item, std::int64_t b) {
    std::vector<std::int32_t>& items = bins_[b].items;
    if (items.capacity() == 0) items.reserve(16);
    items.push_back(static_cast<std::int32_t>(item));
    count(item, b, 1);
}

void Assignment::remove(std::int64_t place, std::int64_t b) {
    count(bins_[b].items[place], b, -1);
    bins_[b].items.erase(bins_[b].items.begin() + place);
}

void Assignment::swap(std::int64_t place, std::int64_t b, std::int64_t other_place,
                      std::int64_t other) {
    std::int32_t &item = bins_[b].items[place], &other_item = bins_[other].items[other_place];
    count(item, b, -1);
    count(other_item, other, -1);
    std::swap(item, other_item);
    count(item, b, 1);
    count(other_item, other, 1);
}

void Assignment::swap_ranks(std::int64_t b, std::int64_t other) {
    std::swap(bins_[b].first_rank, bins_[other].first_rank);
}

std::vector<std::int32_t> Assignment::empty(std::int64_t b) {
    std::vector<std::int32_t> items, removed;
    items.swap(bins_[b].items);
    for (const std::int32_t item : items) {
        if (items_.family[item] >= 0) {
            bins_[b].items.push_back(item);
        } else {
            count(item, b, -1);
            removed.push_back(item);
        }
    }
    return removed;
}

bool Assignment::fits(std::int64_t b, std::int64_t item, std::int64_t other) const {
    const Bin& bin = bins_[b];
    const auto change = [&](const std::vector<std::int64_t>& values, std::int64_t step,
                            std::int64_t k) {
        return (item == kNone ? 0 : values[item * step + k]) -
               (other == kNone ? 0 : values[other * step + k]);
    };
    if (bin.tokens + change(items_.tokens, 1, 0) > bin.degree * rules_.max_tokens ||
        bin.documents + change(items_.documents, 1, 0) > rules_.max_documents)
        return false;
    for (std::int64_t k = 0; k < ssize(items_.cap); ++k)
        if (amount_[b * items_.kinds + k] + change(items_.amount, items_.kinds, k) >
            bin.degree * items_.cap[k])
            return false;
    return true;
}

bool Assignment::has_movable_item(std::int64_t b) const {
    const std::vector<std::int32_t>& items = bins_[b].items;
    return std::any_of(items.begin(), items.end(), [&](auto i) { return items_.family[i] < 0; });
}

std::int64_t Assignment::work(std::int64_t b) const {
    const auto first = cost_.begin() + b * items_.kinds;
    return *std::max_element(first, first + items_.kinds) / bins_[b].degree;
}

std::vector<std::int64_t> Assignment::by_falling_work() const {
    std::vector<std::int64_t> order(bins_.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](std::int64_t a, std::int64_t b) { return work(a) > work(b); });
    return order;
}

// ---- Greedy assignment

// Puts the items of each family into micro batches of the rank that has the least work so far.
bool Assignment::place_families() {
    std::set<Entry> ranks;                 // by work
    std::vector<std::set<Entry>> bins_of;  // by work, per rank; filled when first used
    for (std::int64_t begin = 0, end = 0; begin < items_.size(); begin = end) {
        for (end = begin + 1; end < items_.size() && items_.family[begin] >= 0 &&
                              items_.family[end] == items_.family[begin];)
            ++end;
        if (end - begin == 1) continue;
        if (end - begin > num_micro_batches_) return false;
        for (std::int64_t r = ssize(ranks); r < rules_.num_ranks; ++r)
            ranks.emplace_hint(ranks.end(), 0, r);
        bins_of.resize(rules_.num_ranks);
        // Find the first rank with room in as many micro batches as the family has items.
        std::vector<std::int64_t> chosen;
        auto rank = ranks.begin();
        for (; rank != ranks.end(); ++rank) {
            std::set<Entry>& bins = bins_of[rank->second];
            for (std::int64_t m = ssize(bins); m < num_micro_batches_; ++m)
                bins.emplace_hint(bins.end(), 0, m * rules_.num_ranks + rank->second);
            chosen.clear();
            for (auto at = bins.begin(); at != bins.end() && ssize(chosen) < end - begin; ++at)
                if (has_room(at->second, begin + ssize(chosen))) chosen.push_back(at->second);
            if (ssize(chosen) == end - begin) break;
        }
        if (rank == ranks.end()) return false;
        auto [load, r] = *rank;
        ranks.erase(rank);
        for (std::int64_t item = begin; item < end; ++item) {
            const std::int64_t b = chosen[item - begin], before = work(b);
            put(item, b);
            bins_[b].pinned = true;
            load += work(b) - before;
            bins_of[r].erase({before, b});
            bins_of[r].emplace(work(b), b);
        }
        ranks.emplace(load, r);
    }
    return true;
}

bool Assignment::assign_greedily(bool by_tokens) {
    open_bins();
    if (!place_families()) return false;
    std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>> order;  // keys, then item
    for (std::int64_t i = 0; i < items_.size(); ++i)
        if (items_.family[i] < 0)
            order.push_back({by_tokens ? 0 : -items_.largest_cost(i), -items_.tokens[i], i});
    std::sort(order.begin(), order.end());
    if (!by_tokens && items_.kinds > 1) {
        // With several kinds of cost, items prefer different bins: compare all bins.
        for (const auto& [cost, tokens, item] : order) {
            std::int64_t to = kNone, least = 0;
            for (std::int64_t b = 0; b < num_bins(); ++b) {
                std::int64_t most = 0;
                for (std::int64_t k = 0; k < items_.kinds; ++k)
                    most = std::max(
                        most, cost_[b * items_.kinds + k] + items_.cost[item * items_.kinds + k]);
                if ((to == kNone || most < least) && has_room(b, item)) {
                    to = b;
                    least = most;
                }
            }
            if (to == kNone) return false;
            put(item, to);
        }
        fill_empty_bins();
        return true;
    }
    const auto entry = [&](std::int64_t b) {
        return Entry{by_tokens ? bins_[b].tokens : work(b), b};
    };
    std::vector<Entry> entries;
    for (std::int64_t b = 0; b < num_bins(); ++b) entries.push_back(entry(b));
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> least(std::greater<>{},
                                                                         std::move(entries));
    // Bins without room for an item wait until an item is short enough.
    std::priority_queue<Entry> waiting;
    for (const auto& [cost, tokens, item] : order) {
        for (; !waiting.empty() && waiting.top().first >= -tokens; waiting.pop())
            least.push(entry(waiting.top().second));
        std::vector<Entry> too_small;  // enough tokens are free, but a cap excludes the item
        while (!least.empty() && !has_room(least.top().second, item)) {
            const std::int64_t b = least.top().second;
            const std::int64_t room = rules_.max_tokens - bins_[b].tokens;
            if (room < -tokens)
                waiting.push({room, b});
            else if (bins_[b].documents < rules_.max_documents)
                too_small.push_back(least.top());
            least.pop();
        }
        if (least.empty()) return false;
        const std::int64_t b = least.top().second;
        least.pop();
        put(item, b);
        least.push(entry(b));
        for (const Entry& other : too_small) least.push(other);
    }
    fill_empty_bins();
    return true;
}

bool Assignment::assign_best_fit() {
    open_bins();
    if (!place_families()) return false;
    std::vector<std::int64_t> order;
    for (std::int64_t i = 0; i < items_.size(); ++i)
        if (items_.family[i] < 0) order.push_back(i);
    std::stable_sort(order.begin(), order.end(),
                     [&](auto a, auto b) { return items_.tokens[a] > items_.tokens[b]; });
    std::set<Entry> fullest;  // in order of decreasing tokens
    for (std::int64_t b = 0; b < num_bins(); ++b) fullest.emplace(-bins_[b].tokens, b);
    for (const std::int64_t item : order) {
        auto at = fullest.lower_bound({items_.tokens[item] - rules_.max_tokens, 0});
        while (at != fullest.end() && !has_room(at->second, item)) ++at;
        if (at == fullest.end()) return false;
        const std::int64_t b = at->second;
        fullest.erase(at);
        put(item, b);
        fullest.emplace(-bins_[b].tokens, b);
    }
    fill_empty_bins();
    return true;
}

// Moves the cheapest item that fits into each empty bin, from the busiest bin with several items.
void Assignment::fill_empty_bins() {
    std::vector<std::int64_t> empty;
    for (std::int64_t b = 0; b < num_bins(); ++b)
        if (bins_[b].items.empty()) empty.push_back(b);
    if (empty.empty()) return;
    std::vector<std::int64_t> order = by_falling_work();
    const auto cannot = [&](auto b) { return bins_[b].items.size() < 2 || !has_movable_item(b); };
    order.erase(std::remove_if(order.begin(), order.end(), cannot), order.end());
    for (const std::int64_t b : empty) {
        for (const std::int64_t from : order) {
            const std::vector<std::int32_t>& items = bins_[from].items;
            if (items.size() < 2) continue;
            std::int64_t best = kNone;
            for (std::int64_t i = 0; i < ssize(items); ++i)
                if (items_.family[items[i]] < 0 && has_room(b, items[i]) &&
                    (best == kNone ||
                     items_.largest_cost(items[i]) < items_.largest_cost(items[best])))
                    best = i;
            if (best == kNone) continue;
            const std::int64_t item = items[best];
            remove(best, from);
            put(item, b);
            break;
        }
    }
}

// ---- Order of bins

void Assignment::arrange() {
    const std::int64_t ranks = rules_.num_ranks;
    std::vector<std::int64_t> bin_at(bins_.size(), kNone), load(ranks, 0);
    for (std::int64_t b = 0; b < num_bins(); ++b)
        if (bins_[b].pinned) bin_at[bins_[b].micro_batch * ranks + bins_[b].first_rank] = b;
    const std::vector<std::int64_t> order = by_falling_work();
    auto next = order.begin();
    for (std::int64_t m = 0; m < num_micro_batches_; ++m) {
        std::vector<std::int64_t> free;
        for (std::int64_t r = 0; r < ranks; ++r) {
            const std::int64_t b = bin_at[m * ranks + r];
            if (b == kNone)
                free.push_back(r);
            else
                load[r] += work(b);
        }
        std::stable_sort(free.begin(), free.end(),
                         [&](std::int64_t a, std::int64_t b) { return load[a] < load[b]; });
        for (const std::int64_t r : free) {
            while (bins_[*next].pinned) ++next;
            load[r] += work(*next);
            bin_at[m * ranks + r] = *next++;
        }
    }
    std::vector<Bin> bins(bins_.size());
    for (std::int64_t at = 0; at < ssize(bins); ++at) {
        bins[at] = std::move(bins_[bin_at[at]]);
        bins[at].micro_batch = at / ranks;
        bins[at].first_rank = at % ranks;
    }
    hold(std::move(bins));
}

}  // namespace megapack
