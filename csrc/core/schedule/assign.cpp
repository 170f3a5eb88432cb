#include "core/schedule/assign.hpp"

#include <algorithm>
#include <functional>
#include <iterator>
#include <numeric>
#include <queue>
#include <tuple>
#include <utility>

#include "core/base/check.hpp"

namespace megapack {
namespace {

using Bins = std::vector<std::vector<std::int64_t>>;
using Entry = std::pair<std::int64_t, std::int64_t>;

class Assigner {
  public:
    Assigner(Span<const std::int64_t> costs, Span<const std::int64_t> sizes)
        : costs_(costs),
          sizes_(sizes),
          bins_(sizes.size()),
          loads_(sizes.size(), 0),
          by_cost_(sizes.size()) {}

    void assign_longest_first() {
        std::vector<std::int64_t> items(costs_.size());
        std::iota(items.begin(), items.end(), 0);
        std::stable_sort(items.begin(), items.end(),
                         [&](std::int64_t a, std::int64_t b) { return cost(a) > cost(b); });
        std::priority_queue<Entry, std::vector<Entry>, std::greater<>> open;  // load, bin
        for (std::int64_t b = 0; b < ssize(bins_); ++b)
            if (sizes_[b] > 0) open.push({0, b});
        for (const std::int64_t item : items) {
            const std::int64_t b = open.top().second;
            open.pop();
            bins_[b].push_back(item);
            loads_[b] += cost(item);
            if (ssize(bins_[b]) < sizes_[b]) open.push({loads_[b], b});
        }
    }

    // Exchanges an item of the fullest bin for a cheaper one of another bin as long as the larger
    // of the two totals falls, at most 64 times, until the fullest bin is within 0.1 % of the mean.
    void exchange() {
        constexpr int kRounds = 64;
        const double total =
            static_cast<double>(std::accumulate(loads_.begin(), loads_.end(), std::int64_t{0}));
        const double enough = 1.001 * total / static_cast<double>(loads_.size());
        for (int round = 0; round < kRounds; ++round) {
            const std::int64_t fullest =
                std::max_element(loads_.begin(), loads_.end()) - loads_.begin();
            if (static_cast<double>(loads_[fullest]) <= enough) return;
            if (!exchange_from(fullest)) return;
        }
    }

    std::vector<std::int64_t> take() {
        std::vector<std::int64_t> order;
        order.reserve(costs_.size());
        for (auto& bin : bins_) {
            std::sort(bin.begin(), bin.end(), [&](std::int64_t a, std::int64_t b) {
                return std::make_pair(-cost(a), a) < std::make_pair(-cost(b), b);
            });
            order.insert(order.end(), bin.begin(), bin.end());
        }
        return order;
    }

  private:
    std::int64_t cost(std::int64_t item) const { return costs_[item]; }

    // Makes the exchange after which the larger of the two totals is smallest; returns false if
    // none lowers it. Ties: the smaller bin, then the first items of both bins.
    bool exchange_from(std::int64_t from) {
        std::int64_t best = loads_[from];
        std::tuple<std::int64_t, std::int64_t, std::int64_t> choice;
        for (std::int64_t to = 0; to < ssize(bins_); ++to) {
            const std::int64_t half = (loads_[from] - loads_[to]) / 2;
            if (loads_[from] - half >= best) continue;  // half of the difference is the best move
            const std::vector<Entry>& candidates = by_cost(to);
            const auto first_from = [&](std::int64_t cost) {
                return std::lower_bound(candidates.begin(), candidates.end(), Entry{cost, 0});
            };
            for (std::int64_t i = 0; i < ssize(bins_[from]); ++i) {
                // Try the costs just below and above the ideal one, which would move half of the
                // difference; of equal costs the first item.
                const std::int64_t given = cost(bins_[from][i]);
                const auto above = first_from(given - half);
                Entry least{best, 0};  // the larger total, j
                if (above != candidates.end())
                    least = std::min(least, {loads_[from] - given + above->first, above->second});
                if (above != candidates.begin()) {
                    const auto below = first_from(std::prev(above)->first);
                    least = std::min(least, {loads_[to] + given - below->first, below->second});
                }
                if (least.first < best) {
                    best = least.first;
                    choice = {to, i, least.second};
                }
            }
        }
        if (best == loads_[from]) return false;
        const auto [to, i, j] = choice;
        const std::int64_t moved = cost(bins_[from][i]) - cost(bins_[to][j]);
        std::swap(bins_[from][i], bins_[to][j]);
        loads_[from] -= moved;
        loads_[to] += moved;
        by_cost_[from].clear();
        by_cost_[to].clear();
        return true;
    }

    const std::vector<Entry>& by_cost(std::int64_t b) {
        std::vector<Entry>& sorted = by_cost_[b];
        if (!sorted.empty()) return sorted;
        for (const std::int64_t item : bins_[b]) sorted.push_back({cost(item), ssize(sorted)});
        std::sort(sorted.begin(), sorted.end());
        return sorted;
    }

    Span<const std::int64_t> costs_;
    Span<const std::int64_t> sizes_;
    Bins bins_;
    std::vector<std::int64_t> loads_;
    std::vector<std::vector<Entry>> by_cost_;  // per bin: (cost, place), filled when first used
};

void check_assignment(Span<const std::int64_t> costs, Span<const std::int64_t> bin_sizes) {
    constexpr std::int64_t kMost = std::int64_t{1} << 62;
    const std::int64_t items = costs.size();
    std::int64_t room = 0, total = 0;
    for (std::int64_t b = 0; b < bin_sizes.size(); ++b) {
        check(bin_sizes[b] >= 0, "bin ", b, " has ", bin_sizes[b], " places");
        check(bin_sizes[b] <= items - room, items, " items for bins of more places in all");
        room += bin_sizes[b];
    }
    check(room == items, items, " items for bins of ", room, " places in all");
    for (std::int64_t i = 0; i < costs.size(); ++i) {
        check(costs[i] >= 0, "item ", i, " costs ", costs[i], "; costs are not negative");
        check(costs[i] <= kMost - total, "the costs sum to more than 2^62");
        total += costs[i];
    }
}

}  // namespace

std::vector<std::int64_t> assign_evenly(Span<const std::int64_t> costs,
                                        Span<const std::int64_t> bin_sizes) {
    check_assignment(costs, bin_sizes);
    if (costs.empty()) return {};
    Assigner assigner(costs, bin_sizes);
    assigner.assign_longest_first();
    assigner.exchange();
    return assigner.take();
}

}  // namespace megapack
