// Exchange of items between bins until ranks have equal work: local search from a given assignment,
// then from small random changes of it.
#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

#include "core/base/random.hpp"
#include "core/planning/assignment.hpp"

namespace megapack {
namespace {

constexpr std::int64_t kNone = -1;

// The search ends after this many attempts without an improvement.
constexpr std::int64_t kMostFailures = 256;

// Local search. The members of a barrier wait for its busiest one: members are the bins of a micro
// batch (kMicroBatches), all bins (kPipeline), or the ranks with their work in the step (kStep).
// A path is the sum over barriers of the busiest member's cost; every kind of cost has one.
class Exchange {
  public:
    // `ceilings`: largest cost of a rank per micro batch and kind; empty: no limit.
    Exchange(Assignment& assignment, Balance balance, std::int64_t budget,
             std::vector<std::int64_t> ceilings = {})
        : assignment_(assignment),
          bins_(assignment.bins()),
          items_(assignment.items()),
          kinds_(assignment.items().kinds),
          by_rank_(balance == Balance::kStep),
          budget_(budget),
          ceilings_(std::move(ceilings)),
          barriers_(balance == Balance::kMicroBatches ? assignment.num_micro_batches() : 1),
          families_(std::any_of(items_.family.begin(), items_.family.end(),
                                [](std::int64_t family) { return family >= 0; })),
          paths_(kinds_),
          weights_(kinds_),
          sides_(kinds_) {
        refresh();
    }

    std::int64_t budget() const { return budget_; }

    // Returns what the search minimizes: 8 times the longest path plus the sum of all paths.
    std::int64_t objective() const {
        return 8 * *std::max_element(paths_.begin(), paths_.end()) +
               std::accumulate(paths_.begin(), paths_.end(), std::int64_t{0});
    }

    // Exchanges items between barriers at most `distance` apart until no exchange is an
    // improvement.
    void descend(std::int64_t distance) {
        for (bool any = true; any && budget_ > 0;) {
            any = false;
            for (std::int64_t m = 0; m < ssize(barriers_) && budget_ > 0; ++m)
                while (budget_ > 0 && exchange_best(m, distance)) any = true;
        }
    }

    // Exchanges bins of the busiest rank with those of other ranks in the same micro batch as long
    // as that is an improvement. The contents of micro batches do not change.
    void swap_ranks() {
        std::vector<std::int64_t> load(assignment_.rules().num_ranks * kinds_, 0);
        for (std::int64_t b = 0; b < ssize(bins_); ++b)
            for (std::int64_t r = 0; r < bins_[b].degree; ++r)
                for (std::int64_t k = 0; k < kinds_; ++k)
                    load[(bins_[b].first_rank + r) * kinds_ + k] += share(b, k);
        while (budget_ > 0 && swap_best(load)) continue;
    }

    // Recomputes sums and barriers after bins changed.
    void refresh() {
        const std::int64_t members = by_rank_ ? assignment_.rules().num_ranks : ssize(bins_);
        cost_.assign(members * kinds_, 0);
        bins_of_.assign(by_rank_ ? members : 0, {});
        shift_.assign(ssize(bins_), 0);
        offers_.resize(ssize(bins_) * kinds_);
        for (Offers& offers : offers_) offers.rising.clear();
        begin_.assign(assignment_.num_micro_batches() + 1, 0);
        for (Barrier& barrier : barriers_) barrier.members.clear();
        for (std::int64_t b = 0; b < ssize(bins_); ++b) {
            begin_[bins_[b].micro_batch + 1] = b + 1;
            while (std::int64_t{1} << shift_[b] < bins_[b].degree) ++shift_[b];
            for (std::int64_t member = first_of(b); member < end_of(b); ++member) {
                for (std::int64_t k = 0; k < kinds_; ++k) cost_[member * kinds_ + k] += share(b, k);
                if (by_rank_) bins_of_[member].push_back(b);
            }
        }
        for (std::int64_t m = 0; m < assignment_.num_micro_batches(); ++m)
            begin_[m + 1] = std::max(begin_[m + 1], begin_[m]);
        for (std::int64_t member = 0; member < members; ++member)
            barriers_[barrier_of(member)].members.push_back(member);
        std::fill(paths_.begin(), paths_.end(), 0);
        for (Barrier& barrier : barriers_) {
            barrier.tops.assign(kinds_, {});
            find_tops(barrier);
            for (std::int64_t k = 0; k < kinds_; ++k) paths_[k] += barrier.tops[k].cost[0];
        }
        weigh();
        budget_ -= ssize(bins_) * kinds_;
    }

  private:
    // The three members of a barrier with the largest cost of a kind.
    struct Top {
        std::int64_t member[3] = {kNone, kNone, kNone}, cost[3] = {0, 0, 0};
    };

    struct Barrier {
        std::vector<std::int64_t> members;
        std::vector<Top> tops;  // per kind
    };

    // Exchange of the item at place `give` of bin `from` for that at place `get` of bin `to`. Gains
    // up to 2^10 may be rounding errors.
    struct Move {
        std::int64_t gain = 1 << 10, from = kNone, give = 0, to = 0, get = kNone;
    };

    // Members [first_of(b), end_of(b)) hold bin b.
    std::int64_t first_of(std::int64_t b) const { return by_rank_ ? bins_[b].first_rank : b; }
    std::int64_t end_of(std::int64_t b) const {
        return by_rank_ ? bins_[b].first_rank + bins_[b].degree : b + 1;
    }
    std::int64_t barrier_of(std::int64_t member) const {
        return ssize(barriers_) == 1 ? 0 : bins_[member].micro_batch;
    }
    // Returns the cost of a bin per rank.
    std::int64_t share(std::int64_t b, std::int64_t k) const {
        return assignment_.cost(b)[k] / bins_[b].degree;
    }

    void find_tops(Barrier& barrier) {
        for (std::int64_t k = 0; k < kinds_; ++k) {
            Top top;
            for (const std::int64_t member : barrier.members) {
                const std::int64_t cost = cost_[member * kinds_ + k];
                int at = 3;
                while (at > 0 && (top.member[at - 1] == kNone || cost > top.cost[at - 1])) --at;
                if (at == 3) continue;
                for (int i = 2; i > at; --i) {
                    top.member[i] = top.member[i - 1];
                    top.cost[i] = top.cost[i - 1];
                }
                top.member[at] = member;
                top.cost[at] = cost;
            }
            barrier.tops[k] = top;
        }
    }

    // Sets the weight of each path to (path / longest path)^32, but to at least 1/16.
    void weigh() {
        constexpr std::int64_t kOne = std::int64_t{1} << 8;
        const std::int64_t longest =
            std::max<std::int64_t>(1, *std::max_element(paths_.begin(), paths_.end()));
        for (std::int64_t k = 0; k < kinds_; ++k) {
            std::int64_t ratio = (paths_[k] << 12) / longest;
            for (int i = 0; i < 5; ++i) ratio = ratio * ratio >> 12;
            weights_[k] = std::max(kOne / 16, ratio >> 4);
        }
    }

    // Makes the best exchange of an item of the busiest member; returns false if none is an
    // improvement.
    bool exchange_best(std::int64_t m, std::int64_t distance) {
        for (std::int64_t focus = 0; focus < kinds_; ++focus) {
            Move best;
            const std::int64_t busiest = barriers_[m].tops[focus].member[0];
            if (busiest == kNone) return false;
            if (!by_rank_ && !assignment_.has_movable_item(busiest)) continue;
            const std::int64_t begin = std::max<std::int64_t>(0, m - distance),
                               end = std::min(m + distance + 1, ssize(barriers_));
            for (std::int64_t other = begin; other < end; ++other) {
                choose_partners(other, focus);
                for (const std::int64_t member : partners_) {
                    if (member == busiest) continue;
                    if (!by_rank_) {
                        evaluate(busiest, member, focus, best);
                        continue;
                    }
                    for (const std::int64_t from : bins_of_[busiest]) {
                        if (!assignment_.has_movable_item(from)) continue;
                        for (const std::int64_t to : bins_of_[member])
                            evaluate(from, to, focus, best);
                    }
                }
            }
            if (best.from == kNone) continue;
            apply(best);
            return true;
        }
        return false;
    }

    // Chooses the members of a barrier with the smallest cost of a kind.
    void choose_partners(std::int64_t m, std::int64_t focus) {
        const std::int64_t most = by_rank_ ? 2 : 24;
        partners_ = barriers_[m].members;
        if (ssize(partners_) <= most) return;
        std::nth_element(partners_.begin(), partners_.begin() + most, partners_.end(),
                         [&](std::int64_t a, std::int64_t b) {
                             return std::pair(cost_[a * kinds_ + focus], a) <
                                    std::pair(cost_[b * kinds_ + focus], b);
                         });
        partners_.resize(most);
    }

    // Costs of one kind for the two bins of an exchange: of each bin and, at its barrier, of the
    // busiest other member and of the busiest member.
    struct Sides {
        std::int64_t giver, taker, giver_others, taker_others, giver_top, taker_top;
    };

    // Returns the largest cost of members that hold neither of two bins.
    std::int64_t others_top(const Top& top, std::int64_t a, std::int64_t b) const {
        for (int i = 0; i < 2; ++i)
            if ((top.member[i] < first_of(a) || top.member[i] >= end_of(a)) &&
                (top.member[i] < first_of(b) || top.member[i] >= end_of(b)))
                return top.cost[i];
        return top.cost[2];
    }

    Sides sides_of(std::int64_t from, std::int64_t to, std::int64_t k) const {
        const Top& giver = barriers_[barrier_of(first_of(from))].tops[k];
        const Top& taker = barriers_[barrier_of(first_of(to))].tops[k];
        Sides sides{};
        sides.giver_others = others_top(giver, from, to), sides.giver_top = giver.cost[0];
        sides.taker_others = others_top(taker, from, to), sides.taker_top = taker.cost[0];
        for (std::int64_t member = first_of(from); member < end_of(from); ++member)
            sides.giver = std::max(sides.giver, cost_[member * kinds_ + k]);
        for (std::int64_t member = first_of(to); member < end_of(to); ++member)
            sides.taker = std::max(sides.taker, cost_[member * kinds_ + k]);
        return sides;
    }

    void evaluate(std::int64_t from, std::int64_t to, std::int64_t focus, Move& best) {
        const bool share_rank = first_of(from) < end_of(to) && first_of(to) < end_of(from);
        if (share_rank) return;
        const bool same = barrier_of(first_of(from)) == barrier_of(first_of(to));
        for (std::int64_t k = 0; k < kinds_; ++k) sides_[k] = sides_of(from, to, k);
        if (!same) {  // skip bins whose best possible gain is too small
            std::int64_t most = 0;
            for (std::int64_t k = 0; k < kinds_; ++k)
                most += weights_[k] * most_less(sides_[k], same);
            if (most <= best.gain) return;
        }
        evaluate_items(from, to, same, focus, best);
    }

    // Finds the best exchange of an item of one bin for an item of the other, or for no item; of
    // equal ones, that of the first places. Both bins' items ascend in cost and, usually, in
    // tokens, so one pass over both finds the few exchanges that may be better than `best` and fit.
    void evaluate_items(std::int64_t from, std::int64_t to, bool same, std::int64_t focus,
                        Move& best) {
        budget_ -= num_movable(from) * (ssize(bins_[to].items) + 1);
        const std::int64_t before = best.gain;
        Range range = range_of(from, to, same, focus, before);
        if (range.low > range.high) return;
        const Offers &give = offers_of(from, focus), &get = offers_of(to, focus);
        const bool tokens_rise = give.tokens_rise && get.tokens_rise;
        const std::int64_t giver_room = assignment_.free_tokens(from),
                           taker_room = assignment_.free_tokens(to);
        const auto consider = [&](std::int64_t i, std::int64_t j) {
            const std::int64_t item = bins_[from].items[i],
                               other = j == kNone ? kNone : bins_[to].items[j];
            const std::int64_t gain = gain_of(from, to, item, other, same, focus);
            const bool better =
                gain > best.gain || (gain == best.gain && gain > before &&
                                     std::pair(i, j) < std::pair(best.give, best.get));
            if (!better || !assignment_.fits(to, item, other) ||
                !assignment_.fits(from, other, item) || !below_ceilings(from, to, item, other))
                return;
            best = {gain, from, i, to, j};
            range = range_of(from, to, same, focus, gain - 1);
        };
        const auto end = get.rising.end();
        auto cheapest = get.rising.begin(), shortest = cheapest;
        for (const Offer& offer : give.rising) {
            if (offer.cost < range.low) continue;
            const std::int64_t least_tokens = offer.tokens - taker_room,
                               most_tokens = offer.tokens + giver_room;
            if (ssize(bins_[from].items) > 1 && offer.cost <= range.high && least_tokens <= 0)
                consider(offer.place, kNone);
            if (tokens_rise) advance(shortest, end, &Offer::tokens, least_tokens);
            if (shortest == end || shortest->cost > offer.cost - range.low) continue;
            advance(cheapest, end, &Offer::cost, offer.cost - range.high);
            for (auto other = std::max(cheapest, shortest);
                 other != end && other->cost <= offer.cost - range.low; ++other)
                if (other->tokens >= least_tokens && other->tokens <= most_tokens)
                    consider(offer.place, other->place);
                else if (tokens_rise)
                    break;
        }
    }

    std::int64_t num_movable(std::int64_t b) const {
        const auto& items = bins_[b].items;
        if (!families_) return ssize(items);
        return std::count_if(items.begin(), items.end(),
                             [&](std::int64_t item) { return items_.family[item] < 0; });
    }

    // An item that a bin can give: its cost of a kind, its tokens, its place in the bin.
    struct Offer {
        std::int64_t cost, tokens, place;
    };

    // The items that a bin can give, by ascending cost of a kind.
    struct Offers {
        std::vector<Offer> rising;
        bool tokens_rise = true;  // tokens, too, ascend in this order
    };

    const Offers& offers_of(std::int64_t b, std::int64_t k) {
        Offers& offers = offers_[b * kinds_ + k];
        if (!offers.rising.empty()) return offers;
        const std::vector<std::int32_t>& items = bins_[b].items;
        for (std::int64_t i = 0; i < ssize(items); ++i)
            if (!families_ || items_.family[items[i]] < 0)
                offers.rising.push_back(
                    {items_.cost[items[i] * kinds_ + k], items_.tokens[items[i]], i});
        std::sort(offers.rising.begin(), offers.rising.end(), [](const Offer& x, const Offer& y) {
            return x.cost != y.cost ? x.cost < y.cost : x.tokens < y.tokens;
        });
        offers.tokens_rise =
            std::is_sorted(offers.rising.begin(), offers.rising.end(),
                           [](const Offer& x, const Offer& y) { return x.tokens < y.tokens; });
        return offers;
    }

    // Moves `first` to the first offer whose `number` is at least `least`; numbers ascend.
    static void advance(std::vector<Offer>::const_iterator& first,
                        std::vector<Offer>::const_iterator end, std::int64_t Offer::* number,
                        std::int64_t least) {
        constexpr std::int64_t kSteps = 16;
        const auto near = end - first > kSteps ? first + kSteps : end;
        while (first != near && (*first).*number < least) ++first;
        if (first == near && near != end)
            first = std::partition_point(first, end,
                                         [&](const Offer& offer) { return offer.*number < least; });
    }

    struct Range {
        std::int64_t low, high;
    };

    // Returns how much cost of a kind bin `from` may give to bin `to` in exchanges that gain more
    // than `gain`; those outside of the range gain less. low > high: none gains more.
    Range range_of(std::int64_t from, std::int64_t to, bool same, std::int64_t focus,
                   std::int64_t gain) const {
        for (std::int64_t k = 0; k < kinds_; ++k)
            if (k != focus) gain -= weights_[k] * most_less(sides_[k], same);
        const Sides& s = sides_[focus];
        const std::int64_t needed = gain / weights_[focus] + (gain >= 0 ? 1 : 0);
        const auto of_bin = [&](std::int64_t of_rank, std::int64_t b) {
            const std::int64_t most = (std::int64_t{1} << 60) >> shift_[b];  // above all costs
            return std::clamp(of_rank, -most, most) * (std::int64_t{1} << shift_[b]);
        };
        if (same) return {of_bin(needed, from), of_bin(s.giver - needed - s.taker + 1, to) - 1};
        // If both bins have equally many ranks, one gains what the other loses.
        if (shift_[from] == shift_[to] && s.giver_top - s.giver + s.taker_top - s.taker < needed)
            return {1, 0};
        return {of_bin(needed - (s.taker_top - s.taker_others) - s.giver_top + s.giver, from),
                of_bin(s.giver_top - s.giver_others - needed + s.taker_top - s.taker + 1, to) - 1};
    }

    // Returns an upper bound on how much an exchange can shorten a path.
    static std::int64_t most_less(const Sides& s, bool same) {
        return s.giver_top - s.giver_others + (same ? 0 : s.taker_top - s.taker_others);
    }

    // Returns by how much the weighted paths get shorter. If several members of a barrier are
    // equally busiest, an exchange that makes one of them less busy counts as a gain.
    std::int64_t gain_of(std::int64_t from, std::int64_t to, std::int64_t item, std::int64_t other,
                         bool same, std::int64_t focus) const {
        std::int64_t gain = 0, real = 0;
        for (std::int64_t k = 0; k < kinds_; ++k) {
            const Sides& s = sides_[k];
            const std::int64_t more = items_.cost[item * kinds_ + k] -
                                      (other == kNone ? 0 : items_.cost[other * kinds_ + k]);
            const std::int64_t giver = s.giver - (more >> shift_[from]),
                               taker = s.taker + (more >> shift_[to]);
            if (same) {
                const std::int64_t most = std::max(giver, taker);
                const std::int64_t less = s.giver_top - std::max(most, s.giver_others);
                real += weights_[k] * less;
                gain += weights_[k] * (k == focus ? s.giver - most : less);
            } else {
                gain += weights_[k] * (s.giver_top - std::max(giver, s.giver_others) + s.taker_top -
                                       std::max(taker, s.taker_others));
            }
        }
        return real < 0 ? 0 : gain;
    }

    bool below_ceilings(std::int64_t from, std::int64_t to, std::int64_t item,
                        std::int64_t other) const {
        for (std::int64_t k = 0; k < kinds_ && !ceilings_.empty(); ++k) {
            const Bin &a = bins_[from], &b = bins_[to];
            const std::int64_t more = items_.cost[item * kinds_ + k] -
                                      (other == kNone ? 0 : items_.cost[other * kinds_ + k]);
            if ((assignment_.cost(from)[k] - more) / a.degree >
                    ceilings_[a.micro_batch * kinds_ + k] ||
                (assignment_.cost(to)[k] + more) / b.degree > ceilings_[b.micro_batch * kinds_ + k])
                return false;
        }
        return true;
    }

    void apply(const Move& move) {
        count(move.from, -1);
        count(move.to, -1);
        if (move.get == kNone) {
            const std::int64_t item = bins_[move.from].items[move.give];
            assignment_.remove(move.give, move.from);
            assignment_.put(item, move.to);
        } else {
            assignment_.swap(move.give, move.from, move.get, move.to);
        }
        count(move.from, 1);
        count(move.to, 1);
        for (const std::int64_t b : {move.from, move.to}) {
            for (std::int64_t k = 0; k < kinds_; ++k) offers_[b * kinds_ + k].rising.clear();
            Barrier& barrier = barriers_[barrier_of(first_of(b))];
            for (std::int64_t k = 0; k < kinds_; ++k) paths_[k] -= barrier.tops[k].cost[0];
            find_tops(barrier);
            for (std::int64_t k = 0; k < kinds_; ++k) paths_[k] += barrier.tops[k].cost[0];
        }
        weigh();
    }

    void count(std::int64_t b, std::int64_t sign) {
        for (std::int64_t member = first_of(b); member < end_of(b); ++member)
            for (std::int64_t k = 0; k < kinds_; ++k)
                cost_[member * kinds_ + k] += sign * share(b, k);
    }

    // Makes the best exchange of two bins of a micro batch between the busiest rank and another;
    // returns false if none is an improvement.
    bool swap_best(std::vector<std::int64_t>& load) {
        const auto most = [&](std::int64_t rank) {
            return *std::max_element(load.begin() + rank * kinds_,
                                     load.begin() + (rank + 1) * kinds_);
        };
        std::int64_t busiest = 0;
        for (std::int64_t r = 1; r < assignment_.rules().num_ranks; ++r)
            if (most(r) > most(busiest)) busiest = r;
        std::int64_t best = most(busiest), from = kNone, to = kNone;
        for (std::int64_t b = 0; b < ssize(bins_); ++b) {
            if (bins_[b].first_rank != busiest || !may_change_rank(b)) continue;
            const std::int64_t m = bins_[b].micro_batch;
            for (std::int64_t other = begin_[m]; other < begin_[m + 1]; ++other) {
                if (other == b || !may_change_rank(other)) continue;
                --budget_;
                std::int64_t larger = 0;
                const std::int64_t rank = bins_[other].first_rank;
                for (std::int64_t k = 0; k < kinds_; ++k) {
                    const std::int64_t more = assignment_.cost(other)[k] - assignment_.cost(b)[k];
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
        const std::int64_t rank = bins_[to].first_rank;
        for (std::int64_t k = 0; k < kinds_; ++k) {
            const std::int64_t more = assignment_.cost(to)[k] - assignment_.cost(from)[k];
            load[busiest * kinds_ + k] += more;
            load[rank * kinds_ + k] -= more;
        }
        assignment_.swap_ranks(from, to);
        return true;
    }

    bool may_change_rank(std::int64_t b) const { return bins_[b].degree == 1 && !bins_[b].pinned; }

    Assignment& assignment_;
    const std::vector<Bin>& bins_;
    const Items& items_;
    std::int64_t kinds_;
    bool by_rank_;
    std::int64_t budget_;
    std::vector<std::int64_t> ceilings_;
    std::vector<Barrier> barriers_;
    bool families_;                                   // some item belongs to a family
    std::vector<std::int64_t> paths_, weights_;       // per kind
    std::vector<std::int64_t> shift_;                 // per bin: log2 of its degree
    std::vector<std::int64_t> begin_;                 // per micro batch: its first bin
    std::vector<std::int64_t> cost_;                  // per member and kind: cost of one rank
    std::vector<std::vector<std::int64_t>> bins_of_;  // per rank
    std::vector<std::int64_t> partners_;
    std::vector<Sides> sides_;    // per kind
    std::vector<Offers> offers_;  // per bin and kind; empty: not computed
};

// Searches from an assignment; returns the unused budget and the objective.
std::pair<std::int64_t, std::int64_t> descend(Assignment& assignment, std::int64_t budget) {
    const Balance balance = assignment.rules().balance;
    const bool arranged = balance == Balance::kMicroBatches && assignment.of_single_ranks();
    Exchange exchange(assignment, balance, budget);
    exchange.descend(0);
    if (balance == Balance::kMicroBatches) exchange.descend(1);
    if (arranged) {
        assignment.arrange();
        exchange.refresh();
    }
    if (balance == Balance::kMicroBatches) exchange.descend(assignment.num_micro_batches());
    if (balance == Balance::kStep) exchange.swap_ranks();
    if (arranged) assignment.arrange();
    exchange.refresh();
    return {exchange.budget(), exchange.objective()};
}

// Empties a few bins and assigns their items again, in random order, to bins with room: half of
// them to the one with the least work. Returns false if no bin has room. Draws random words of
// `chance` from number `word` on and advances it.
bool perturb(Assignment& assignment, const Random& chance, std::uint64_t& word) {
    const std::int64_t num_bins = assignment.num_bins();
    std::vector<std::int32_t> removed;
    for (std::int64_t n = std::min<std::int64_t>(num_bins, 2 + chance.below(word++, 2)); n > 0; --n)
        for (const std::int32_t item : assignment.empty(chance.below(word++, num_bins)))
            removed.push_back(item);
    for (std::int64_t i = ssize(removed) - 1; i > 0; --i)
        std::swap(removed[i], removed[chance.below(word++, i + 1)]);
    for (const std::int64_t item : removed) {
        std::int64_t to = kNone, num_with_room = 0;
        const bool anywhere = chance.below(word++, 2) == 0;
        for (std::int64_t b = 0; b < num_bins; ++b) {
            if (!assignment.has_room(b, item)) continue;
            ++num_with_room;
            if (to == kNone || (anywhere ? chance.below(word++, num_with_room) == 0
                                         : assignment.work(b) < assignment.work(to)))
                to = b;
        }
        if (to == kNone) return false;
        assignment.put(item, to);
    }
    assignment.fill_empty_bins();
    return true;
}

// Makes the work of ranks in the step equal without making a path longer.
void level_ranks(Assignment& assignment, std::int64_t budget) {
    const std::int64_t kinds = assignment.items().kinds;
    std::vector<std::int64_t> ceilings(assignment.num_micro_batches() * kinds, 0);
    for (std::int64_t b = 0; b < assignment.num_bins(); ++b)
        for (std::int64_t k = 0; k < kinds; ++k) {
            std::int64_t& most = ceilings[assignment.bins()[b].micro_batch * kinds + k];
            most = std::max(most, assignment.cost(b)[k] / assignment.bins()[b].degree);
        }
    Exchange exchange(assignment, Balance::kStep, budget, std::move(ceilings));
    exchange.swap_ranks();
    exchange.refresh();
    exchange.descend(0);
}

}  // namespace

// Searches, then repeats the search from random changes and keeps improvements. A few items are
// searched thoroughly; a step of thousands spends its budget in the first search.
std::int64_t balance(Assignment& assignment, std::int64_t budget) {
    auto [unused, best] = descend(assignment, budget);
    const std::int64_t least = (8 + assignment.items().kinds) * assignment.items().unit;
    const Random chance(0);
    std::uint64_t word = 0;
    Assignment before(assignment.items(), assignment.rules(), assignment.num_micro_batches());
    bool saved = false;
    for (std::int64_t failures = 0; failures < kMostFailures && unused > 0 &&
                                    assignment.num_bins() > 1 && best > least + (least >> 12);
         ++failures) {
        if (!saved) before.restore(assignment);
        std::int64_t now = best;
        unused -= assignment.items().size() + assignment.num_bins();
        if (perturb(assignment, chance, word)) std::tie(unused, now) = descend(assignment, unused);
        saved = now >= best;
        if (saved) assignment.restore(before);
        if (now < best) failures = 0;
        best = std::min(best, now);
    }
    if (assignment.rules().balance != Balance::kStep) level_ranks(assignment, budget / 4);
    assignment.fill_empty_bins();
    return best;
}

}  // namespace megapack
