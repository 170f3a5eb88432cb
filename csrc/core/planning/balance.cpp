#include "core/planning/balance.hpp"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <queue>
#include <tuple>
#include <utility>

#include "core/base/random.hpp"

namespace megapack {
namespace {

constexpr std::int64_t kNone = -1;

}  // namespace

// ---- dealing ------------------------------------------------------------------------------------

void Dealing::open_bins() {
    bins_.clear();
    for (std::int64_t m = 0; m < num_micro_batches_; ++m)
        for (std::int64_t r = 0; r < rules_.num_ranks; ++r) bins_.push_back({m, r, 1});
    cost_.assign(bins_.size() * items_.kinds, 0);
}

void Dealing::put(std::int64_t item, std::int64_t b) {
    Bin& bin = bins_[b];
    bin.tokens += items_.tokens[item];
    bin.documents += items_.documents[item];
    bin.items.push_back(static_cast<std::int32_t>(item));
    for (std::int64_t k = 0; k < items_.kinds; ++k)
        cost_[b * items_.kinds + k] += items_.cost[item * items_.kinds + k];
}

std::int64_t Dealing::work(std::int64_t b) const {
    const auto first = cost_.begin() + b * items_.kinds;
    return *std::max_element(first, first + items_.kinds) / bins_[b].degree;
}

// The chunks of a family go to micro batches of the rank that has least work so far.
bool Dealing::place_families() {
    std::vector<std::int64_t> load(rules_.num_ranks, 0);
    for (std::int64_t begin = 0; begin < items_.size();) {
        std::int64_t end = begin + 1;
        while (end < items_.size() && items_.family[begin] >= 0 &&
               items_.family[end] == items_.family[begin])
            ++end;
        if (end - begin > 1) {
            if (end - begin > num_micro_batches_) return false;
            // Ranks by rising load; the first with as many micro batches that have room.
            std::vector<std::int64_t> ranks(rules_.num_ranks);
            std::iota(ranks.begin(), ranks.end(), 0);
            std::stable_sort(ranks.begin(), ranks.end(),
                             [&](auto a, auto b) { return load[a] < load[b]; });
            std::vector<std::int64_t> found;
            for (const std::int64_t rank : ranks) {
                std::vector<std::int64_t> mine;
                for (std::int64_t m = 0; m < num_micro_batches_; ++m)
                    mine.push_back(m * rules_.num_ranks + rank);
                std::stable_sort(mine.begin(), mine.end(),
                                 [&](auto a, auto b) { return work(a) < work(b); });
                found.clear();
                for (std::int64_t item = begin, at = 0; item < end && at < ssize(mine); ++at)
                    if (has_room(bins_[mine[at]], item)) {
                        found.push_back(mine[at]);
                        ++item;
                    }
                if (ssize(found) == end - begin) break;
            }
            if (ssize(found) < end - begin) return false;
            for (std::int64_t item = begin; item < end; ++item) {
                const std::int64_t b = found[item - begin], before = work(b);
                put(item, b);
                bins_[b].pinned = true;
                load[bins_[b].first_rank] += work(b) - before;
            }
        }
        begin = end;
    }
    return true;
}

bool Dealing::deal_dearest_first(bool by_tokens) {
    open_bins();
    if (!place_families()) return false;
    std::vector<std::int64_t> key(items_.size()), order;
    for (std::int64_t i = 0; i < items_.size(); ++i) {
        const auto first = items_.cost.begin() + i * items_.kinds;
        key[i] = by_tokens ? items_.tokens[i] : *std::max_element(first, first + items_.kinds);
        if (items_.family[i] < 0) order.push_back(i);
    }
    std::sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
        return std::tuple(-key[a], -items_.tokens[a], a) <
               std::tuple(-key[b], -items_.tokens[b], b);
    });
    using Entry = std::pair<std::int64_t, std::int64_t>;  // work, bin
    const auto entry = [&](std::int64_t b) {
        return Entry{by_tokens ? bins_[b].tokens : work(b), b};
    };
    std::vector<Entry> entries, aside;
    for (std::int64_t b = 0; b < ssize(bins_); ++b) entries.push_back(entry(b));
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> least(std::greater<>{},
                                                                         std::move(entries));
    for (const std::int64_t item : order) {
        while (!least.empty() && !has_room(bins_[least.top().second], item)) {
            aside.push_back(least.top());
            least.pop();
        }
        if (least.empty()) return false;
        const std::int64_t b = least.top().second;
        least.pop();
        put(item, b);
        least.push(entry(b));
        for (const Entry& other : aside) least.push(other);
        aside.clear();
    }
    fill_empty_bins();
    return true;
}

bool Dealing::deal_best_fit() {
    open_bins();
    if (!place_families()) return false;
    std::vector<std::int64_t> order;
    for (std::int64_t i = 0; i < items_.size(); ++i)
        if (items_.family[i] < 0) order.push_back(i);
    std::stable_sort(order.begin(), order.end(),
                     [&](auto a, auto b) { return items_.tokens[a] > items_.tokens[b]; });
    for (const std::int64_t item : order) {
        std::int64_t best = kNone;
        for (std::int64_t b = 0; b < ssize(bins_); ++b)
            if (has_room(bins_[b], item) && (best == kNone || bins_[b].tokens > bins_[best].tokens))
                best = b;
        if (best == kNone) return false;
        put(item, best);
    }
    fill_empty_bins();
    return true;
}

void Dealing::take(std::vector<Bin> bins) {
    bins_ = std::move(bins);
    cost_.assign(bins_.size() * items_.kinds, 0);
    for (std::int64_t b = 0; b < ssize(bins_); ++b) {
        std::vector<std::int32_t> items;
        items.swap(bins_[b].items);
        bins_[b].tokens = bins_[b].documents = 0;
        for (const std::int32_t item : items) put(item, b);
    }
    fill_empty_bins();
}

std::vector<std::int64_t> Dealing::by_falling_work() const {
    std::vector<std::int64_t> order(bins_.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](std::int64_t a, std::int64_t b) { return work(a) > work(b); });
    return order;
}

// An empty bin gets the cheapest item that it holds of the bin with most work that has several.
void Dealing::fill_empty_bins() {
    std::vector<std::int64_t> empty;
    for (std::int64_t b = 0; b < ssize(bins_); ++b)
        if (bins_[b].items.empty()) empty.push_back(b);
    if (empty.empty()) return;
    const std::vector<std::int64_t> order = by_falling_work();
    for (const std::int64_t b : empty) {
        for (const std::int64_t from : order) {
            std::vector<std::int32_t>& items = bins_[from].items;
            if (items.size() < 2) continue;
            std::int64_t best = kNone;
            for (std::int64_t i = 0; i < ssize(items); ++i)
                if (items_.family[items[i]] < 0 && has_room(bins_[b], items[i]) &&
                    (best == kNone || items_.cost[items[i] * items_.kinds] <
                                          items_.cost[items[best] * items_.kinds]))
                    best = i;
            if (best == kNone) continue;
            const std::int64_t item = items[best];
            items.erase(items.begin() + best);
            bins_[from].tokens -= items_.tokens[item];
            bins_[from].documents -= items_.documents[item];
            for (std::int64_t k = 0; k < items_.kinds; ++k)
                cost_[from * items_.kinds + k] -= items_.cost[item * items_.kinds + k];
            put(item, b);
            break;
        }
    }
}

void Dealing::arrange() {
    const std::int64_t ranks = rules_.num_ranks;
    std::vector<std::int64_t> bin_at(bins_.size(), kNone), load(ranks, 0);
    for (std::int64_t b = 0; b < ssize(bins_); ++b)
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
    std::vector<std::int64_t> cost(cost_.size());
    for (std::int64_t at = 0; at < ssize(bins); ++at) {
        bins[at] = std::move(bins_[bin_at[at]]);
        bins[at].micro_batch = at / ranks;
        bins[at].first_rank = at % ranks;
        std::copy_n(cost_.begin() + bin_at[at] * items_.kinds, items_.kinds,
                    cost.begin() + at * items_.kinds);
    }
    bins_ = std::move(bins);
    cost_ = std::move(cost);
}

// ---- exchanging ---------------------------------------------------------------------------------

// Ranks wait for the busiest of a meeting: those of a micro batch (kMicroBatches), all bins
// (kPipeline), or all ranks with what they have in the step (kStep). What is made small is the sum
// over meetings of the busiest member.
class Exchange {
  public:
    Exchange(Dealing& dealing, std::int64_t looks)
        : d_(dealing),
          kinds_(dealing.items_.kinds),
          by_rank_(dealing.rules_.balance == Balance::kStep),
          looks_(looks) {
        const bool many = dealing.rules_.balance == Balance::kMicroBatches;
        meetings_.resize(many ? dealing.num_micro_batches_ : 1);
        refresh();
    }

    std::int64_t looks() const { return looks_; }

    std::int64_t objective() const {
        std::int64_t sum = 0;
        for (const Meeting& meeting : meetings_) sum += meeting.busiest;
        return sum;
    }

    // Until nothing pays between meetings that are at most so far apart.
    void descend(std::int64_t distance) {
        for (bool any = true; any && looks_ > 0;) {
            any = false;
            for (std::int64_t m = 0; m < ssize(meetings_) && looks_ > 0; ++m)
                while (looks_ > 0 && exchange_best(m, distance)) any = true;
        }
    }

    // Whole bins change ranks inside their micro batch: ranks have as much in the step, and the
    // micro batches stay as they are.
    void swap_ranks() {
        std::vector<std::int64_t> load(d_.rules_.num_ranks * kinds_, 0);
        for (std::int64_t b = 0; b < ssize(d_.bins_); ++b)
            for (std::int64_t r = 0; r < d_.bins_[b].degree; ++r)
                for (std::int64_t k = 0; k < kinds_; ++k)
                    load[(d_.bins_[b].first_rank + r) * kinds_ + k] +=
                        d_.cost_[b * kinds_ + k] / d_.bins_[b].degree;
        while (looks_ > 0 && swap_best(load)) continue;
        refresh();
    }

    // Bins and costs changed: sums and meetings again.
    void refresh() {
        const std::int64_t members = by_rank_ ? d_.rules_.num_ranks : ssize(d_.bins_);
        cost_.assign(members * kinds_, 0);
        work_.assign(members, 0);
        bins_of_.assign(by_rank_ ? members : 0, {});
        for (Meeting& meeting : meetings_) meeting.members.clear();
        for (std::int64_t b = 0; b < ssize(d_.bins_); ++b) {
            const Bin& bin = d_.bins_[b];
            for (std::int64_t r = 0; r < (by_rank_ ? bin.degree : 1); ++r) {
                const std::int64_t member = by_rank_ ? bin.first_rank + r : b;
                for (std::int64_t k = 0; k < kinds_; ++k)
                    cost_[member * kinds_ + k] += d_.cost_[b * kinds_ + k] / bin.degree;
                if (by_rank_) bins_of_[member].push_back(b);
            }
        }
        for (std::int64_t member = 0; member < members; ++member) {
            meetings_[meeting_of(member)].members.push_back(member);
            update(member);
        }
        for (std::int64_t m = 0; m < ssize(meetings_); ++m) look_over(m);
    }

  private:
    struct Meeting {
        std::vector<std::int64_t> members;
        std::int64_t first = kNone, busiest = 0, second = 0;  // the busiest member, its work, ...
    };

    struct Move {
        std::int64_t gain = 0, from = kNone, give = 0, to = 0, get = kNone;  // bins, places in them
    };

    std::int64_t meeting_of(std::int64_t member) const {
        return ssize(meetings_) == 1 ? 0 : d_.bins_[member].micro_batch;
    }
    std::int64_t member_of(std::int64_t b) const { return by_rank_ ? d_.bins_[b].first_rank : b; }

    void update(std::int64_t member) {
        const auto first = cost_.begin() + member * kinds_;
        work_[member] = *std::max_element(first, first + kinds_);
    }

    void look_over(std::int64_t m) {
        Meeting& meeting = meetings_[m];
        meeting.first = kNone;
        meeting.busiest = meeting.second = 0;
        for (const std::int64_t member : meeting.members) {
            if (meeting.first == kNone || work_[member] > meeting.busiest) {
                meeting.second = meeting.busiest;
                meeting.busiest = work_[member];
                meeting.first = member;
            } else {
                meeting.second = std::max(meeting.second, work_[member]);
            }
        }
    }

    // The best exchange of an item of a meeting's busiest member; false: none pays.
    bool exchange_best(std::int64_t m, std::int64_t distance) {
        Move best;
        const std::int64_t busiest = meetings_[m].first;
        if (busiest == kNone) return false;
        const std::vector<std::int64_t> own{busiest};
        for (const std::int64_t from : by_rank_ ? bins_of_[busiest] : own) {
            if (by_rank_ && d_.bins_[from].degree > 1) continue;
            for (std::int64_t other = std::max<std::int64_t>(0, m - distance);
                 other <= std::min(m + distance, ssize(meetings_) - 1); ++other)
                for (const std::int64_t member : partners(other))
                    look_at_member(from, member, best);
        }
        if (best.from == kNone) return false;
        apply(best);
        return true;
    }

    // The members of a meeting that have least work.
    const std::vector<std::int64_t>& partners(std::int64_t m) {
        const std::int64_t kMost = by_rank_ ? 2 : 24;
        const std::vector<std::int64_t>& members = meetings_[m].members;
        if (ssize(members) <= kMost) return members;
        partners_ = members;
        std::nth_element(partners_.begin(), partners_.begin() + kMost, partners_.end(),
                         [&](std::int64_t a, std::int64_t b) {
                             return std::pair(work_[a], a) < std::pair(work_[b], b);
                         });
        partners_.resize(kMost);
        return partners_;
    }

    void look_at_member(std::int64_t from, std::int64_t member, Move& best) {
        if (member == member_of(from)) return;
        if (!by_rank_) return look_at_bin(from, member, best);
        for (const std::int64_t to : bins_of_[member])
            if (d_.bins_[to].degree == 1) look_at_bin(from, to, best);
    }

    void look_at_bin(std::int64_t from, std::int64_t to, Move& best) {
        const std::int64_t a = member_of(from), b = member_of(to);
        const std::int64_t here = meeting_of(a), there = meeting_of(b);
        const Meeting &mine = meetings_[here], &theirs = meetings_[there];
        // Without what a and b have: the best that an exchange could reach.
        const std::int64_t rest_here = a == mine.first ? mine.second : mine.busiest;
        const std::int64_t rest_there = b == theirs.first ? theirs.second : theirs.busiest;
        const bool same = here == there;
        if (!same && mine.busiest + theirs.busiest - rest_here - rest_there <= best.gain) return;
        const std::vector<std::int32_t>&give = d_.bins_[from].items, &get = d_.bins_[to].items;
        for (std::int64_t i = 0; i < ssize(give); ++i) {
            if (d_.items_.family[give[i]] >= 0) continue;
            for (std::int64_t j = kNone; j < ssize(get); ++j) {
                --looks_;
                const std::int64_t other = j == kNone ? kNone : get[j];
                if (j == kNone ? ssize(give) == 1 : d_.items_.family[other] >= 0) continue;
                if (!fits(from, to, give[i], other)) continue;
                const std::int64_t work_a = work_with(from, a, other, give[i]);
                const std::int64_t work_b = work_with(to, b, give[i], other);
                const std::int64_t gain = same ? work_[a] - std::max(work_a, work_b)
                                               : mine.busiest - std::max(work_a, rest_here) +
                                                     theirs.busiest - std::max(work_b, rest_there);
                if (gain > best.gain) best = {gain, from, i, to, j};
            }
        }
    }

    bool fits(std::int64_t from, std::int64_t to, std::int64_t give, std::int64_t get) const {
        const std::int64_t tokens =
            d_.items_.tokens[give] - (get == kNone ? 0 : d_.items_.tokens[get]);
        const std::int64_t documents =
            d_.items_.documents[give] - (get == kNone ? 0 : d_.items_.documents[get]);
        const Bin &a = d_.bins_[from], &b = d_.bins_[to];
        return b.tokens + tokens <= b.degree * d_.rules_.max_tokens &&
               a.tokens - tokens <= a.degree * d_.rules_.max_tokens &&
               b.documents + documents <= d_.rules_.max_documents &&
               a.documents - documents <= d_.rules_.max_documents;
    }

    // Work of a member whose bin takes one item and gives another.
    std::int64_t work_with(std::int64_t b, std::int64_t member, std::int64_t take,
                           std::int64_t give) const {
        std::int64_t most = 0;
        for (std::int64_t k = 0; k < kinds_; ++k) {
            const std::int64_t change = (take == kNone ? 0 : d_.items_.cost[take * kinds_ + k]) -
                                        (give == kNone ? 0 : d_.items_.cost[give * kinds_ + k]);
            const std::int64_t cost =
                by_rank_ ? cost_[member * kinds_ + k] + change
                         : (d_.cost_[b * kinds_ + k] + change) / d_.bins_[b].degree;
            most = std::max(most, cost);
        }
        return most;
    }

    void apply(const Move& move) {
        std::vector<std::int32_t>&give = d_.bins_[move.from].items, &get = d_.bins_[move.to].items;
        const std::int32_t item = give[move.give];
        if (move.get == kNone) {
            give.erase(give.begin() + move.give);
            get.push_back(item);
            count(move.from, item, -1);
        } else {
            const std::int32_t other = get[move.get];
            give[move.give] = other;
            get[move.get] = item;
            count(move.from, other, 1);
            count(move.from, item, -1);
            count(move.to, other, -1);
        }
        count(move.to, item, 1);
        for (const std::int64_t b : {move.from, move.to}) look_over(meeting_of(member_of(b)));
    }

    void count(std::int64_t b, std::int64_t item, std::int64_t sign) {
        Bin& bin = d_.bins_[b];
        bin.tokens += sign * d_.items_.tokens[item];
        bin.documents += sign * d_.items_.documents[item];
        const std::int64_t member = member_of(b);
        for (std::int64_t k = 0; k < kinds_; ++k) {
            const std::int64_t change = sign * d_.items_.cost[item * kinds_ + k];
            std::int64_t& cost = d_.cost_[b * kinds_ + k];
            cost += change;
            std::int64_t& own = cost_[member * kinds_ + k];
            own = by_rank_ ? own + change : cost / bin.degree;
        }
        update(member);
    }

    // Of the busiest rank and another, two bins of one micro batch; false: none pays.
    bool swap_best(std::vector<std::int64_t>& load) {
        const auto most = [&](std::int64_t rank) {
            return *std::max_element(load.begin() + rank * kinds_,
                                     load.begin() + (rank + 1) * kinds_);
        };
        std::int64_t busiest = 0;
        for (std::int64_t r = 1; r < d_.rules_.num_ranks; ++r)
            if (most(r) > most(busiest)) busiest = r;
        std::int64_t best = most(busiest), from = kNone, to = kNone;
        for (std::int64_t b = 0; b < ssize(d_.bins_); ++b) {
            if (d_.bins_[b].first_rank != busiest || !may_change_rank(b)) continue;
            for (std::int64_t other = 0; other < ssize(d_.bins_); ++other) {
                if (d_.bins_[other].micro_batch != d_.bins_[b].micro_batch || other == b ||
                    !may_change_rank(other))
                    continue;
                --looks_;
                std::int64_t larger = 0;
                const std::int64_t rank = d_.bins_[other].first_rank;
                for (std::int64_t k = 0; k < kinds_; ++k) {
                    const std::int64_t more =
                        d_.cost_[other * kinds_ + k] - d_.cost_[b * kinds_ + k];
                    larger = std::max({larger, load[busiest * kinds_ + k] + more,
                                       load[rank * kinds_ + k] - more});
                }
                if (larger < best) {
                    best = larger;
                    from = b;
                    to = other;
                }
            }
        }
        if (from == kNone) return false;
        const std::int64_t rank = d_.bins_[to].first_rank;
        for (std::int64_t k = 0; k < kinds_; ++k) {
            const std::int64_t more = d_.cost_[to * kinds_ + k] - d_.cost_[from * kinds_ + k];
            load[busiest * kinds_ + k] += more;
            load[rank * kinds_ + k] -= more;
        }
        std::swap(d_.bins_[from].first_rank, d_.bins_[to].first_rank);
        return true;
    }

    bool may_change_rank(std::int64_t b) const {
        return d_.bins_[b].degree == 1 && !d_.bins_[b].pinned;
    }

    Dealing& d_;
    std::int64_t kinds_;
    bool by_rank_;
    std::int64_t looks_;
    std::vector<std::int64_t> cost_, work_;  // of member and kind, of a rank of it; the largest
    std::vector<std::vector<std::int64_t>> bins_of_;  // of a rank
    std::vector<Meeting> meetings_;
    std::vector<std::int64_t> partners_;
};

// No arrangement is below: the work of all, shared evenly, and the dearest item.
std::int64_t Dealing::least_objective() const {
    std::int64_t dearest = 0, most = 0;
    for (std::int64_t k = 0; k < items_.kinds; ++k) {
        std::int64_t sum = 0;
        for (std::int64_t i = 0; i < items_.size(); ++i) {
            const std::int64_t cost = items_.cost[i * items_.kinds + k];
            dearest = std::max(dearest, cost / rules_.max_degree);
            sum += cost;
        }
        most = std::max(most, sum);
    }
    const bool pipeline = rules_.balance == Balance::kPipeline;
    return std::max(dearest, most / (pipeline ? ssize(bins_) : rules_.num_ranks));
}

// Descends, and then again and again from a place near by: a few bins are emptied and their items
// dealt anew, which is kept where it ends lower. Few items are so searched from all sides; a step
// of thousands has spent its looks before.
void Dealing::improve(std::int64_t looks) {
    const bool whole =
        std::all_of(bins_.begin(), bins_.end(), [](const Bin& bin) { return bin.degree == 1; });
    const auto descend = [&](std::int64_t budget) {
        Exchange exchange(*this, budget);
        exchange.descend(0);
        exchange.descend(1);
        if (whole && rules_.balance == Balance::kMicroBatches) {
            arrange();
            exchange.refresh();
        }
        exchange.descend(num_micro_batches_);
        if (whole && rules_.balance == Balance::kMicroBatches) arrange();
        exchange.refresh();
        exchange.swap_ranks();
        return std::pair(exchange.looks(), exchange.objective());
    };
    auto [left, best] = descend(looks);
    const std::int64_t bound = least_objective(), enough = bound + (bound >> 12);
    const Random chance(0);
    std::uint64_t word = 0;
    const std::int64_t num_bins = ssize(bins_);
    while (left > 0 && num_bins > 1 && best > enough) {
        const std::vector<Bin> bins = bins_;
        const std::vector<std::int64_t> cost = cost_;
        std::vector<std::int64_t> loose;
        for (std::int64_t n = std::min<std::int64_t>(num_bins, 2 + chance.below(word++, 2)); n > 0;
             --n) {
            const std::int64_t b = chance.below(word++, num_bins);
            Bin& bin = bins_[b];
            std::vector<std::int32_t> items;
            items.swap(bin.items);
            bin.tokens = bin.documents = 0;
            std::fill_n(cost_.begin() + b * items_.kinds, items_.kinds, 0);
            for (const std::int32_t item : items) {
                if (items_.family[item] >= 0)
                    put(item, b);
                else
                    loose.push_back(item);
            }
        }
        for (std::int64_t i = ssize(loose) - 1; i > 0; --i)
            std::swap(loose[i], loose[chance.below(word++, i + 1)]);
        bool fits = true;
        for (const std::int64_t item : loose) {
            std::int64_t to = kNone, seen = 0;
            const bool anywhere = chance.below(word++, 2) == 0;
            for (std::int64_t b = 0; b < num_bins; ++b) {
                if (!has_room(bins_[b], item)) continue;
                ++seen;
                if (to == kNone ||
                    (anywhere ? chance.below(word++, seen) == 0 : work(b) < work(to)))
                    to = b;
            }
            fits = fits && to != kNone;
            if (!fits) break;
            put(item, to);
        }
        left -= items_.size() + num_bins * (1 + ssize(loose));
        std::int64_t now = best;
        if (fits) {
            fill_empty_bins();
            std::tie(left, now) = descend(left);
        }
        if (now >= best) {
            bins_ = bins;
            cost_ = cost;
        }
        best = std::min(best, now);
    }
}

}  // namespace megapack
