// Items exchanged between bins until ranks have equal work.
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

// Searches near by that find nothing better, after which there is little hope.
constexpr std::int64_t kMostInVain = 256;

// Ranks wait for the busiest of a meeting: those of a micro batch (kMicroBatches), all bins
// (kPipeline), or all ranks with what they have in the step (kStep). The sum over meetings of the
// busiest member is a path; every kind of cost has one.
class Exchange {
  public:
    // `ceilings`: of micro batch and kind, what no rank may exceed in it; none: any cost.
    Exchange(Assignment& assignment, Balance balance, std::int64_t looks,
             std::vector<std::int64_t> ceilings = {})
        : d_(assignment),
          items_(assignment.items()),
          kinds_(assignment.items().kinds),
          by_rank_(balance == Balance::kStep),
          looks_(looks),
          ceilings_(std::move(ceilings)),
          meetings_(balance == Balance::kMicroBatches ? assignment.num_micro_batches() : 1),
          families_(std::any_of(items_.family.begin(), items_.family.end(),
                                [](std::int64_t family) { return family >= 0; })),
          paths_(kinds_),
          weights_(kinds_) {
        refresh();
    }

    std::int64_t looks() const { return looks_; }

    // The longest path; of two that are as long, the one whose others are shorter.
    std::int64_t objective() const {
        return 8 * *std::max_element(paths_.begin(), paths_.end()) +
               std::accumulate(paths_.begin(), paths_.end(), std::int64_t{0});
    }

    // Until nothing pays between meetings that are at most so far apart.
    void descend(std::int64_t distance) {
        for (bool any = true; any && looks_ > 0;) {
            any = false;
            for (std::int64_t m = 0; m < ssize(meetings_) && looks_ > 0; ++m)
                while (looks_ > 0 && exchange_best(m, distance)) any = true;
        }
    }

    // The busiest rank's bins for those of other ranks in their micro batches, as long as that
    // pays: micro batches stay as they are.
    void swap_ranks() {
        std::vector<std::int64_t> load(d_.rules().num_ranks * kinds_, 0);
        for (std::int64_t b = 0; b < d_.num_bins(); ++b)
            for (std::int64_t r = 0; r < d_.bins()[b].degree; ++r)
                for (std::int64_t k = 0; k < kinds_; ++k)
                    load[(d_.bins()[b].first_rank + r) * kinds_ + k] += share(b, k);
        while (looks_ > 0 && swap_best(load)) continue;
    }

    // Bins and costs changed: sums and meetings again.
    void refresh() {
        const std::int64_t members = by_rank_ ? d_.rules().num_ranks : d_.num_bins();
        cost_.assign(members * kinds_, 0);
        bins_of_.assign(by_rank_ ? members : 0, {});
        shift_.assign(d_.num_bins(), 0);
        begin_.assign(d_.num_micro_batches() + 1, 0);
        for (Meeting& meeting : meetings_) meeting.members.clear();
        for (std::int64_t b = 0; b < d_.num_bins(); ++b) {
            begin_[d_.bins()[b].micro_batch + 1] = b + 1;
            while (std::int64_t{1} << shift_[b] < d_.bins()[b].degree) ++shift_[b];
            for (std::int64_t member = first_of(b); member < end_of(b); ++member) {
                for (std::int64_t k = 0; k < kinds_; ++k) cost_[member * kinds_ + k] += share(b, k);
                if (by_rank_) bins_of_[member].push_back(b);
            }
        }
        for (std::int64_t m = 0; m < d_.num_micro_batches(); ++m)
            begin_[m + 1] = std::max(begin_[m + 1], begin_[m]);
        for (std::int64_t member = 0; member < members; ++member)
            meetings_[meeting_of(member)].members.push_back(member);
        std::fill(paths_.begin(), paths_.end(), 0);
        for (Meeting& meeting : meetings_) {
            meeting.tops.assign(kinds_, {});
            look_over(meeting);
            for (std::int64_t k = 0; k < kinds_; ++k) paths_[k] += meeting.tops[k].cost[0];
        }
        weigh();
        looks_ -= d_.num_bins() * kinds_;
    }

  private:
    // The three members of a meeting that have most of a kind of cost.
    struct Top {
        std::int64_t member[3] = {kNone, kNone, kNone}, cost[3] = {0, 0, 0};
    };

    struct Meeting {
        std::vector<std::int64_t> members;
        std::vector<Top> tops;  // per kind
    };

    // What rounding shares may feign is no gain.
    struct Move {
        std::int64_t gain = 1 << 10, from = kNone, give = 0, to = 0,
                     get = kNone;  // bins, places in them
    };

    // Members of the meeting that hold a bin.
    std::int64_t first_of(std::int64_t b) const { return by_rank_ ? d_.bins()[b].first_rank : b; }
    std::int64_t end_of(std::int64_t b) const {
        return by_rank_ ? d_.bins()[b].first_rank + d_.bins()[b].degree : b + 1;
    }
    std::int64_t meeting_of(std::int64_t member) const {
        return ssize(meetings_) == 1 ? 0 : d_.bins()[member].micro_batch;
    }
    // Of one rank.
    std::int64_t share(std::int64_t b, std::int64_t k) const {
        return d_.cost(b)[k] / d_.bins()[b].degree;
    }

    void look_over(Meeting& meeting) {
        for (std::int64_t k = 0; k < kinds_; ++k) {
            Top top;
            for (const std::int64_t member : meeting.members) {
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
            meeting.tops[k] = top;
        }
    }

    // A path that is shorter than the longest counts less: by the 32nd power of their ratio, at
    // least by a 16th.
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

    // The best exchange of an item of a meeting's busiest member; false: none pays.
    bool exchange_best(std::int64_t m, std::int64_t distance) {
        for (std::int64_t focus = 0; focus < kinds_; ++focus) {
            Move best;
            const std::int64_t busiest = meetings_[m].tops[focus].member[0];
            if (busiest == kNone) return false;
            if (!by_rank_ && !d_.is_loose(busiest)) continue;
            const std::int64_t begin = std::max<std::int64_t>(0, m - distance),
                               end = std::min(m + distance + 1, ssize(meetings_));
            for (std::int64_t other = begin; other < end; ++other) {
                choose_partners(other, focus);
                for (const std::int64_t member : partners_) {
                    if (member == busiest) continue;
                    if (!by_rank_) {
                        look_at(busiest, member, focus, best);
                        continue;
                    }
                    for (const std::int64_t from : bins_of_[busiest]) {
                        if (!d_.is_loose(from)) continue;
                        for (const std::int64_t to : bins_of_[member])
                            look_at(from, to, focus, best);
                    }
                }
            }
            if (best.from == kNone) continue;
            apply(best);
            return true;
        }
        return false;
    }

    // The members of a meeting that have least of a kind.
    void choose_partners(std::int64_t m, std::int64_t focus) {
        const std::int64_t most = by_rank_ ? 2 : 24;
        partners_ = meetings_[m].members;
        if (ssize(partners_) <= most) return;
        std::nth_element(partners_.begin(), partners_.begin() + most, partners_.end(),
                         [&](std::int64_t a, std::int64_t b) {
                             return std::pair(cost_[a * kinds_ + focus], a) <
                                    std::pair(cost_[b * kinds_ + focus], b);
                         });
        partners_.resize(most);
    }

    // What a kind costs two bins and the others of their meetings, while they exchange.
    struct Sides {
        std::int64_t mine, theirs, my_rest, their_rest, my_top, their_top;
    };

    // The most that members have other than those of two bins.
    std::int64_t rest(const Top& top, std::int64_t a, std::int64_t b) const {
        for (int i = 0; i < 2; ++i)
            if ((top.member[i] < first_of(a) || top.member[i] >= end_of(a)) &&
                (top.member[i] < first_of(b) || top.member[i] >= end_of(b)))
                return top.cost[i];
        return top.cost[2];
    }

    Sides sides_of(std::int64_t from, std::int64_t to, std::int64_t k) const {
        const Top& mine = meetings_[meeting_of(first_of(from))].tops[k];
        const Top& theirs = meetings_[meeting_of(first_of(to))].tops[k];
        Sides sides{
            0, 0, rest(mine, from, to), rest(theirs, from, to), mine.cost[0], theirs.cost[0]};
        for (std::int64_t member = first_of(from); member < end_of(from); ++member)
            sides.mine = std::max(sides.mine, cost_[member * kinds_ + k]);
        for (std::int64_t member = first_of(to); member < end_of(to); ++member)
            sides.theirs = std::max(sides.theirs, cost_[member * kinds_ + k]);
        return sides;
    }

    void look_at(std::int64_t from, std::int64_t to, std::int64_t focus, Move& best) {
        if (first_of(from) < end_of(to) && first_of(to) < end_of(from)) return;  // ranks of both
        const std::int64_t here = meeting_of(first_of(from)), there = meeting_of(first_of(to));
        const bool same = here == there;
        sides_.clear();
        for (std::int64_t k = 0; k < kinds_; ++k) sides_.push_back(sides_of(from, to, k));
        if (!same) {  // the best that an exchange could reach
            std::int64_t most = 0;
            for (std::int64_t k = 0; k < kinds_; ++k)
                most += weights_[k] * (sides_[k].my_top - sides_[k].my_rest + sides_[k].their_top -
                                       sides_[k].their_rest);
            if (most <= best.gain) return;
        }
        if (kinds_ == 1)
            look_at_items<1>(from, to, same, focus, best);
        else
            look_at_items<0>(from, to, same, focus, best);
    }

    // Every item of one bin for every item of the other, and for none. `Kinds`: 0, as many as there
    // are.
    template <std::int64_t Kinds>
    void look_at_items(std::int64_t from, std::int64_t to, bool same, std::int64_t focus,
                       Move& best) {
        const std::vector<std::int32_t>&give = d_.bins()[from].items, &get = d_.bins()[to].items;
        const std::int64_t my_shift = shift_[from], their_shift = shift_[to];
        for (std::int64_t i = 0; i < ssize(give); ++i) {
            const std::int64_t item = give[i];
            if (families_ && items_.family[item] >= 0) continue;
            looks_ -= ssize(get) + 1;
            for (std::int64_t j = ssize(give) == 1 ? 0 : kNone; j < ssize(get); ++j) {
                const std::int64_t other = j == kNone ? kNone : get[j];
                if (other != kNone && families_ && items_.family[other] >= 0) continue;
                const std::int64_t gain =
                    gain_of<Kinds>(item, other, my_shift, their_shift, same, focus);
                if (gain > best.gain && d_.fits(to, item, other) && d_.fits(from, other, item) &&
                    below_ceilings(from, to, item, other))
                    best = {gain, from, i, to, j};
            }
        }
    }

    // How much shorter the paths become, by their weights. Inside a meeting several members may be
    // the busiest: then it counts that one is not any more.
    template <std::int64_t Kinds>
    std::int64_t gain_of(std::int64_t item, std::int64_t other, std::int64_t my_shift,
                         std::int64_t their_shift, bool same, std::int64_t focus) const {
        const std::int64_t kinds = Kinds > 0 ? Kinds : kinds_;
        std::int64_t gain = 0, real = 0;
        for (std::int64_t k = 0; k < kinds; ++k) {
            const Sides& s = sides_[k];
            const std::int64_t more = items_.cost[item * kinds + k] -
                                      (other == kNone ? 0 : items_.cost[other * kinds + k]);
            const std::int64_t mine = s.mine - (more >> my_shift),
                               theirs = s.theirs + (more >> their_shift);
            if (same) {
                const std::int64_t most = std::max(mine, theirs);
                const std::int64_t less = s.my_top - std::max(most, s.my_rest);
                real += weights_[k] * less;
                gain += weights_[k] * (k == focus ? s.mine - most : less);
            } else {
                gain += weights_[k] * (s.my_top - std::max(mine, s.my_rest) + s.their_top -
                                       std::max(theirs, s.their_rest));
            }
        }
        return real < 0 ? 0 : gain;
    }

    bool below_ceilings(std::int64_t from, std::int64_t to, std::int64_t item,
                        std::int64_t other) const {
        for (std::int64_t k = 0; k < kinds_ && !ceilings_.empty(); ++k) {
            const Bin &a = d_.bins()[from], &b = d_.bins()[to];
            const std::int64_t more = items_.cost[item * kinds_ + k] -
                                      (other == kNone ? 0 : items_.cost[other * kinds_ + k]);
            if ((d_.cost(from)[k] - more) / a.degree > ceilings_[a.micro_batch * kinds_ + k] ||
                (d_.cost(to)[k] + more) / b.degree > ceilings_[b.micro_batch * kinds_ + k])
                return false;
        }
        return true;
    }

    void apply(const Move& move) {
        count(move.from, -1);
        count(move.to, -1);
        if (move.get == kNone) {
            const std::int64_t item = d_.bins()[move.from].items[move.give];
            d_.remove(move.give, move.from);
            d_.put(item, move.to);
        } else {
            d_.swap(move.give, move.from, move.get, move.to);
        }
        count(move.from, 1);
        count(move.to, 1);
        const std::int64_t here = meeting_of(first_of(move.from)),
                           there = meeting_of(first_of(move.to));
        for (const std::int64_t m : {here, there}) {
            Meeting& meeting = meetings_[m];
            for (std::int64_t k = 0; k < kinds_; ++k) paths_[k] -= meeting.tops[k].cost[0];
            look_over(meeting);
            for (std::int64_t k = 0; k < kinds_; ++k) paths_[k] += meeting.tops[k].cost[0];
        }
        weigh();
    }

    void count(std::int64_t b, std::int64_t sign) {
        for (std::int64_t member = first_of(b); member < end_of(b); ++member)
            for (std::int64_t k = 0; k < kinds_; ++k)
                cost_[member * kinds_ + k] += sign * share(b, k);
    }

    // Of the busiest rank and another, two bins of one micro batch; false: none pays.
    bool swap_best(std::vector<std::int64_t>& load) {
        const auto most = [&](std::int64_t rank) {
            return *std::max_element(load.begin() + rank * kinds_,
                                     load.begin() + (rank + 1) * kinds_);
        };
        std::int64_t busiest = 0;
        for (std::int64_t r = 1; r < d_.rules().num_ranks; ++r)
            if (most(r) > most(busiest)) busiest = r;
        std::int64_t best = most(busiest), from = kNone, to = kNone;
        for (std::int64_t b = 0; b < d_.num_bins(); ++b) {
            if (d_.bins()[b].first_rank != busiest || !may_change_rank(b)) continue;
            const std::int64_t m = d_.bins()[b].micro_batch;
            for (std::int64_t other = begin_[m]; other < begin_[m + 1]; ++other) {
                if (other == b || !may_change_rank(other)) continue;
                --looks_;
                std::int64_t larger = 0;
                const std::int64_t rank = d_.bins()[other].first_rank;
                for (std::int64_t k = 0; k < kinds_; ++k) {
                    const std::int64_t more = d_.cost(other)[k] - d_.cost(b)[k];
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
        const std::int64_t rank = d_.bins()[to].first_rank;
        for (std::int64_t k = 0; k < kinds_; ++k) {
            const std::int64_t more = d_.cost(to)[k] - d_.cost(from)[k];
            load[busiest * kinds_ + k] += more;
            load[rank * kinds_ + k] -= more;
        }
        d_.swap_ranks(from, to);
        return true;
    }

    bool may_change_rank(std::int64_t b) const {
        return d_.bins()[b].degree == 1 && !d_.bins()[b].pinned;
    }

    Assignment& d_;
    const Items& items_;
    std::int64_t kinds_;
    bool by_rank_;
    std::int64_t looks_;
    std::vector<std::int64_t> ceilings_;
    std::vector<Meeting> meetings_;
    bool families_;                                   // whether there are any
    std::vector<std::int64_t> paths_, weights_;       // per kind
    std::vector<std::int64_t> shift_;                 // of a bin: the logarithm of its degree
    std::vector<std::int64_t> begin_;                 // of a micro batch, its first bin
    std::vector<std::int64_t> cost_;                  // of member and kind, of a rank of it
    std::vector<std::vector<std::int64_t>> bins_of_;  // of a rank
    std::vector<std::int64_t> partners_;
    std::vector<Sides> sides_;  // per kind
};

// The looks that are left, and the objective.
std::pair<std::int64_t, std::int64_t> descend(Assignment& assignment, std::int64_t looks) {
    const Balance balance = assignment.rules().balance;
    const bool arranged = balance == Balance::kMicroBatches && assignment.of_single_ranks();
    Exchange exchange(assignment, balance, looks);
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
    return {exchange.looks(), exchange.objective()};
}

// A few bins are emptied and their items dealt anew, in any order, to bins with room, half of them
// to that with least work. False where one has room nowhere. Reads chance from `word` on.
bool disturb(Assignment& assignment, const Random& chance, std::uint64_t& word) {
    const std::int64_t num_bins = assignment.num_bins();
    std::vector<std::int32_t> loose;
    for (std::int64_t n = std::min<std::int64_t>(num_bins, 2 + chance.below(word++, 2)); n > 0; --n)
        for (const std::int32_t item : assignment.empty(chance.below(word++, num_bins)))
            loose.push_back(item);
    for (std::int64_t i = ssize(loose) - 1; i > 0; --i)
        std::swap(loose[i], loose[chance.below(word++, i + 1)]);
    for (const std::int64_t item : loose) {
        std::int64_t to = kNone, seen = 0;
        const bool anywhere = chance.below(word++, 2) == 0;
        for (std::int64_t b = 0; b < num_bins; ++b) {
            if (!assignment.has_room(b, item)) continue;
            ++seen;
            if (to == kNone || (anywhere ? chance.below(word++, seen) == 0
                                         : assignment.work(b) < assignment.work(to)))
                to = b;
        }
        if (to == kNone) return false;
        assignment.put(item, to);
    }
    assignment.fill_empty_bins();
    return true;
}

// Ranks have as much in the step, no path becoming longer.
void level_ranks(Assignment& assignment, std::int64_t looks) {
    const std::int64_t kinds = assignment.items().kinds;
    std::vector<std::int64_t> ceilings(assignment.num_micro_batches() * kinds, 0);
    for (std::int64_t b = 0; b < assignment.num_bins(); ++b)
        for (std::int64_t k = 0; k < kinds; ++k) {
            std::int64_t& most = ceilings[assignment.bins()[b].micro_batch * kinds + k];
            most = std::max(most, assignment.cost(b)[k] / assignment.bins()[b].degree);
        }
    Exchange exchange(assignment, Balance::kStep, looks, std::move(ceilings));
    exchange.swap_ranks();
    exchange.refresh();
    exchange.descend(0);
}

}  // namespace

// Descends, and then again and again from a place near by, which is kept where it ends lower. Few
// items are so searched from all sides; a step of thousands has spent its looks before.
std::int64_t balance(Assignment& assignment, std::int64_t looks) {
    auto [left, best] = descend(assignment, looks);
    const std::int64_t least = (8 + assignment.items().kinds) * assignment.items().unit;
    const Random chance(0);
    std::uint64_t word = 0;
    for (std::int64_t in_vain = 0; in_vain < kMostInVain && left > 0 && assignment.num_bins() > 1 &&
                                   best > least + (least >> 12);
         ++in_vain) {
        const Assignment before = assignment;
        std::int64_t now = best;
        left -= assignment.items().size() + assignment.num_bins();
        if (disturb(assignment, chance, word)) std::tie(left, now) = descend(assignment, left);
        if (now >= best) assignment.take_back(before);
        if (now < best) in_vain = 0;
        best = std::min(best, now);
    }
    if (assignment.rules().balance != Balance::kStep) level_ranks(assignment, looks / 4);
    assignment.fill_empty_bins();
    return best;
}

}  // namespace megapack
