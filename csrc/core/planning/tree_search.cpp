#include "core/planning/tree_search.hpp"

#include <numeric>
#include <set>

namespace megapack {
namespace {

constexpr std::int64_t kNone = kNoSequence;
constexpr std::int64_t kMostFailures = 256;  // attempts without an improvement
constexpr std::int64_t kTolerance = 512;     // an attempt may be worse by this part of the least
constexpr std::int64_t kMostBranches = 64;   // branches of a bin that may move
constexpr std::int64_t kMostPartners = 16;   // bins that an urgent bin exchanges branches with
constexpr std::int64_t kMostAbove = 128;     // final weight of a token above the cap
// Upper bound of ranks times the integer cost of all sequences.
constexpr std::int64_t kWorkOfAll = std::int64_t{1} << 52;

bool share_a_root(const TreeBin& a, const TreeBin& b) {
    auto i = a.roots.begin(), j = b.roots.begin();
    while (i != a.roots.end() && j != b.roots.end()) {
        if (*i == *j) return true;
        *i < *j ? ++i : ++j;
    }
    return false;
}

}  // namespace

Forest::Forest(Span<const std::int64_t> lengths, Span<const std::int64_t> shared,
               std::int64_t linear_cost_tokens, std::int64_t num_ranks)
    : linear_cost_tokens_(linear_cost_tokens) {
    double sum = 0;
    for (const std::int64_t n : lengths)
        sum += static_cast<double>(n) * static_cast<double>(n + linear_cost_tokens);
    while (sum * static_cast<double>(num_ranks) > static_cast<double>(kWorkOfAll)) {
        sum /= 2;
        ++shift_;
    }
    std::int32_t root = -1;
    for (std::int64_t k = 0; k < lengths.size(); ++k) {
        whole_.push_back(prefix(lengths[k]));
        root += shared[k] == 0;
        root_.push_back(root);
        all_ += whole_[k] - prefix(shared[k]);
    }
    least_.emplace_back(shared.begin(), shared.end());
    for (std::int64_t width = 1; 2 * width <= lengths.size(); width *= 2) {
        const std::vector<std::int32_t>& half = least_.back();
        std::vector<std::int32_t> row(lengths.size() - 2 * width + 1);
        for (std::int64_t k = 0; k < ssize(row); ++k) row[k] = std::min(half[k], half[k + width]);
        least_.push_back(std::move(row));
    }
}

void TreeSearch::assign(std::vector<TreeRun> runs, std::int64_t cap) {
    std::stable_sort(runs.begin(), runs.end(), [](const TreeRun& a, const TreeRun& b) {
        return std::pair(-a.sum.tokens, a.begin) < std::pair(-b.sum.tokens, b.begin);
    });
    std::set<std::pair<std::int64_t, std::int64_t>> fullest;  // (-tokens, bin)
    for (std::int64_t b = 0; b < ssize(bins_); ++b) fullest.emplace(0, b);
    for (const TreeRun& run : runs) {
        auto at = fullest.lower_bound({run.sum.tokens - cap, 0});
        if (at == fullest.end()) --at;
        const auto [tokens, b] = *at;
        fullest.erase(at);
        fullest.emplace(tokens - run.sum.tokens, b);
        for (std::int64_t k = run.begin; k < run.end; ++k)
            bins_[b].members.push_back(static_cast<std::int32_t>(k));
    }
    for (TreeBin& bin : bins_) {
        std::sort(bin.members.begin(), bin.members.end());
        refresh(bin);
    }
}

// Recomputes the sum and the branches of a bin: its sequences, and the members of each inner node.
void TreeSearch::refresh(TreeBin& bin) const {
    const std::int64_t n = ssize(bin.members);
    const auto member = [&](std::int64_t k) {
        return k < 0 || k >= n ? kNone : std::int64_t{bin.members[k]};
    };
    std::vector<std::int64_t> shared(n + 1, 0);
    std::vector<Amount> begin(n + 1);
    bin.roots.clear();
    bin.branches.clear();
    for (std::int64_t k = 0; k < n; ++k) {
        shared[k] = forest_.shared(member(k - 1), member(k));
        begin[k + 1] = begin[k] + forest_.whole(member(k)) - forest_.prefix(shared[k]);
        if (shared[k] == 0) bin.roots.push_back(forest_.root(member(k)));
    }
    bin.sum = begin[n];
    const auto add = [&](std::int64_t i, std::int64_t j) {
        const Amount sum = begin[j] - begin[i];
        const Amount joined = forest_.common(member(i - 1), member(j));
        bin.branches.push_back({static_cast<std::int32_t>(i), static_cast<std::int32_t>(j),
                                sum - forest_.prefix(shared[j]) + joined,
                                sum + forest_.prefix(shared[i])});
    };
    std::vector<std::pair<std::int64_t, std::int64_t>> open;  // (first member, shared tokens)
    for (std::int64_t k = 0; k < n; ++k) {
        add(k, k + 1);
        std::int64_t first = k;
        while (!open.empty() && open.back().second > shared[k + 1]) {
            first = open.back().first;
            if (first < k) add(first, k + 1);
            open.pop_back();
        }
        if (shared[k + 1] > 0 && (open.empty() || open.back().second < shared[k + 1]))
            open.push_back({first, shared[k + 1]});
    }
    if (ssize(bin.branches) > kMostBranches) {  // keep some of every size
        std::stable_sort(
            bin.branches.begin(), bin.branches.end(),
            [](const Branch& a, const Branch& b) { return a.freed.tokens > b.freed.tokens; });
        for (std::int64_t k = 0; k < kMostBranches; ++k)
            bin.branches[k] = bin.branches[k * ssize(bin.branches) / kMostBranches];
        bin.branches.resize(kMostBranches);
    }
}

void TreeSearch::arrange() {
    std::vector<std::int64_t> order(bins_.size()), load(ranks_, 0), free(ranks_);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
        return bins_[a].sum.cost > bins_[b].sum.cost;
    });
    std::vector<TreeBin> arranged(bins_.size());
    for (std::int64_t begin = 0; begin < ssize(bins_); begin += ranks_) {
        std::iota(free.begin(), free.end(), 0);
        std::stable_sort(free.begin(), free.end(),
                         [&](std::int64_t a, std::int64_t b) { return load[a] < load[b]; });
        for (std::int64_t i = 0; i < ranks_; ++i) {
            TreeBin& bin = bins_[order[begin + i]];
            load[free[i]] += bin.sum.cost;
            arranged[begin + free[i]] = std::move(bin);
        }
    }
    bins_ = std::move(arranged);
    std::fill(changed_.begin(), changed_.end(), true);
    find_tops();
}

// ---- Effect of a move

void TreeSearch::find_tops() {
    std::fill(load_.begin(), load_.end(), 0);
    for (std::int64_t b = 0; b < ssize(bins_); ++b) load_[member_of(b)] += bins_[b].sum.cost;
    for (std::int64_t i = 0; i < ssize(tops_); ++i) find_top(i);
}

void TreeSearch::find_top(std::int64_t barrier) {
    Top top;
    const bool all = ssize(tops_) == 1;
    const std::int64_t begin = all ? 0 : barrier * ranks_;
    const std::int64_t end = all ? ssize(load_) : begin + ranks_;
    for (std::int64_t member = begin; member < end; ++member) {
        int at = 3;
        while (at > 0 && (top.member[at - 1] == kNone || load_[member] > top.cost[at - 1])) --at;
        for (int i = 2; i > at; --i) {
            top.member[i] = top.member[i - 1];
            top.cost[i] = top.cost[i - 1];
        }
        if (at == 3) continue;
        top.member[at] = member;
        top.cost[at] = load_[member];
    }
    tops_[barrier] = top;
}

// Returns by how much the path gets shorter if the costs of two bins grow.
std::int64_t TreeSearch::path_gain(std::int64_t a, std::int64_t more_a, std::int64_t b,
                                   std::int64_t more_b) const {
    const std::int64_t i = member_of(a), j = b == kNone ? i : member_of(b);
    const auto others = [&](const Top& top, std::int64_t first, std::int64_t second) {
        int k = 0;
        while (k < 2 && (top.member[k] == first || top.member[k] == second)) ++k;
        return top.member[k] == first || top.member[k] == second ? 0 : top.cost[k];
    };
    const Top& top = tops_[barrier_of(a)];
    if (i == j) return top.cost[0] - std::max(others(top, i, i), load_[i] + more_a + more_b);
    const std::int64_t now_a = load_[i] + more_a, now_b = load_[j] + more_b;
    if (barrier_of(a) == barrier_of(b))
        return top.cost[0] - std::max({others(top, i, j), now_a, now_b});
    const Top& other = tops_[barrier_of(b)];
    return top.cost[0] - std::max(others(top, i, i), now_a) + other.cost[0] -
           std::max(others(other, j, j), now_b);
}

// Returns by how much the objective falls if bins a and b (none: kNone) grow.
std::int64_t TreeSearch::gain_of(std::int64_t a, const Amount& more_a, std::int64_t b,
                                 const Amount& more_b) const {
    const std::int64_t tokens_a = bins_[a].sum.tokens;
    std::int64_t more = above(tokens_a + more_a.tokens) - above(tokens_a);
    if (b != kNone) {
        const std::int64_t tokens_b = bins_[b].sum.tokens;
        more += above(tokens_b + more_b.tokens) - above(tokens_b);
    }
    if (balanced_ && more > 0) return -(above_weight_ * more * token_cost_);
    const std::int64_t gain = -(above_weight_ * more + more_a.tokens + more_b.tokens) * token_cost_;
    return balanced_ ? gain + ranks_ * path_gain(a, more_a.cost, b, more_b.cost) : gain;
}

// Returns what the members of a branch add to a bin from which another branch is removed.
Amount TreeSearch::added(const TreeBin& from, const Branch& branch, const TreeBin& to,
                         const Branch* without) const {
    const std::int32_t* members = from.members.data();
    const std::int64_t first = members[branch.begin], last = members[branch.end - 1];
    const auto place = [&](std::int64_t sequence) {
        return std::lower_bound(to.members.begin(), to.members.end(), sequence) -
               to.members.begin();
    };
    const std::int64_t n = ssize(to.members), p = place(first), q = place(last);
    const std::int64_t gap = without ? without->begin : n, gap_end = without ? without->end : n;
    const std::int64_t before = p > gap && p <= gap_end ? gap - 1 : p - 1;
    const std::int64_t after = q >= gap && q < gap_end ? gap_end : q;
    const std::int64_t left = before < 0 ? kNone : to.members[before];
    const std::int64_t right = after >= n ? kNone : to.members[after];
    const std::int64_t inside =
        q - p - std::max<std::int64_t>(0, std::min(q, gap_end) - std::max(p, gap));
    if (inside == 0)
        return branch.alone - forest_.common(left, first) - forest_.common(last, right) +
               forest_.common(left, right);
    // Members of the bin lie between those of the branch: merge both.
    Amount sum;
    std::int64_t merged = left, old = left, j = p;
    const auto pass_old = [&](std::int64_t until) {
        for (; j < q && to.members[j] < until; ++j) {
            if (j >= gap && j < gap_end) continue;
            sum += forest_.common(old, to.members[j]) - forest_.common(merged, to.members[j]);
            merged = old = to.members[j];
        }
    };
    for (std::int64_t i = branch.begin; i < branch.end; ++i) {
        pass_old(members[i]);
        sum += forest_.whole(members[i]) - forest_.common(merged, members[i]);
        merged = members[i];
    }
    return sum + forest_.common(old, right) - forest_.common(merged, right);
}

TreeSearch::Entry TreeSearch::entry(const TreeBin& from, const Branch& branch,
                                    const TreeBin& to) const {
    const auto place = [&](std::int64_t member) {
        return std::lower_bound(to.members.begin(), to.members.end(), from.members[member]) -
               to.members.begin();
    };
    return {added(from, branch, to, nullptr), place(branch.begin) - 1, place(branch.end - 1)};
}

// ---- TreeSearch

// Evaluates the move of every branch of a bin to another one; with `exchange`, also the exchange
// for every branch of the other one.
void TreeSearch::evaluate(std::int64_t from, std::int64_t to, bool exchange, Move& best) {
    const TreeBin &a = bins_[from], &b = bins_[to];
    const bool related = share_a_root(a, b);
    const std::int64_t num_others = exchange ? ssize(b.branches) : 0;
    std::vector<Entry> gets;
    budget_ -= (ssize(a.branches) + 1) * (num_others + 1);
    const auto entry_of = [&](const TreeBin& source, const Branch& branch, const TreeBin& target) {
        if (!related) return Entry{branch.alone, 0, -1};
        const Entry found = entry(source, branch, target);
        budget_ -= 8 + found.right - found.left;
        return found;
    };
    for (std::int64_t j = 0; j < num_others; ++j) gets.push_back(entry_of(b, b.branches[j], a));
    for (std::int64_t i = 0; i < ssize(a.branches); ++i) {
        const Branch& give = a.branches[i];
        const Entry gift = entry_of(a, give, b);
        const auto consider = [&](std::int64_t j, const Amount& more_a, const Amount& more_b) {
            const std::int64_t gain = gain_of(from, more_a, to, more_b);
            if (gain > best.gain) best = {gain, from, i, to, j};
        };
        consider(kNone, Amount{} - give.freed, gift.whole);
        for (std::int64_t j = 0; j < num_others; ++j) {
            const Branch& get = b.branches[j];
            const bool near = gift.touches(get), near_too = gets[j].touches(give);
            const Amount there = near ? added(a, give, b, &get) : gift.whole;
            const Amount here = near_too ? added(b, get, a, &give) : gets[j].whole;
            if (near) budget_ -= 8 + gift.right - gift.left;
            if (near_too) budget_ -= 8 + gets[j].right - gets[j].left;
            consider(j, here - give.freed, there - get.freed);
        }
    }
}

// Chooses bins to exchange branches with: those that share a prefix and, with `any`, those that can
// take the most tokens or cost.
std::vector<std::int64_t> TreeSearch::partners_of(std::int64_t b) {
    std::vector<std::int64_t> partners, others;
    for (std::int64_t other = 0; other < ssize(bins_); ++other) {
        if (other == b) continue;
        (share_a_root(bins_[b], bins_[other]) ? partners : others).push_back(other);
    }
    budget_ -= ssize(bins_);
    if (!is_urgent(b)) return partners;
    const bool by_cost = balanced_ && bins_[b].sum.tokens <= cap_;
    const auto room = [&](std::int64_t other) {
        return std::pair(by_cost ? load_[member_of(other)] - tops_[barrier_of(other)].cost[0]
                                 : bins_[other].sum.tokens,
                         other);
    };
    const std::int64_t most = std::min(kMostPartners, ssize(others));
    std::partial_sort(others.begin(), others.begin() + most, others.end(),
                      [&](std::int64_t x, std::int64_t y) { return room(x) < room(y); });
    partners.insert(partners.end(), others.begin(), others.begin() + most);
    return partners;
}

// Makes the best move between a bin and others; returns false if none pays.
bool TreeSearch::improve(std::int64_t b) {
    Move best;
    for (const std::int64_t other : partners_of(b)) {
        evaluate(b, other, true, best);
        evaluate(other, b, false, best);
    }
    changed_[b] = changed_[b] && best.from != kNone;
    if (best.from == kNone) return false;
    apply(best);
    return true;
}

void TreeSearch::apply(const Move& move) {
    const auto without = [](const TreeBin& bin, const Branch* branch) {
        std::vector<std::int32_t> members = bin.members;
        if (branch != nullptr)
            members.erase(members.begin() + branch->begin, members.begin() + branch->end);
        return members;
    };
    const auto with = [](std::vector<std::int32_t> members, const TreeBin& bin,
                         const Branch* branch) {
        if (branch == nullptr) return members;
        const auto size = static_cast<std::ptrdiff_t>(members.size());
        members.insert(members.end(), bin.members.begin() + branch->begin,
                       bin.members.begin() + branch->end);
        std::inplace_merge(members.begin(), members.begin() + size, members.end());
        return members;
    };
    const TreeBin &a = bins_[move.from], &b = bins_[move.to];
    const Branch* give = &a.branches[move.give];
    const Branch* get = move.get == kNone ? nullptr : &b.branches[move.get];
    std::vector<std::int32_t> members_a = with(without(a, give), b, get);
    std::vector<std::int32_t> members_b = with(without(b, get), a, give);
    change(move.from, std::move(members_a));
    change(move.to, std::move(members_b));
}

void TreeSearch::change(std::int64_t b, std::vector<std::int32_t> members) {
    const std::int64_t before = bins_[b].sum.cost;
    bins_[b].members = std::move(members);
    changed_[b] = true;
    refresh(bins_[b]);
    budget_ -= 8 * ssize(bins_[b].members);
    load_[member_of(b)] += bins_[b].sum.cost - before;
    find_top(barrier_of(b));
}

// Searches from urgent bins until none of them improves, then from changed ones.
void TreeSearch::descend() {
    const auto pass = [&](const auto& is_open) {
        bool any = false;
        for (std::int64_t b = 0; b < ssize(bins_); ++b)
            while (budget_ > 0 && is_open(b) && improve(b)) any = true;
        return any;
    };
    do
        while (pass([&](std::int64_t b) { return is_urgent(b); })) continue;
    while (pass([&](std::int64_t b) { return changed_[b]; }));
}

// Puts a sequence into the bin in which it costs least.
void TreeSearch::insert(std::int32_t sequence) {
    const TreeBin alone{{sequence}, {}, {}, {}};
    const Branch branch{0, 1, {}, forest_.whole(sequence)};
    std::int64_t best = kNone, most = 0;
    for (std::int64_t b = 0; b < ssize(bins_); ++b) {
        const std::int64_t gain = gain_of(b, added(alone, branch, bins_[b], nullptr), kNone, {});
        if (best == kNone || gain > most) {
            best = b;
            most = gain;
        }
    }
    budget_ -= 8 * ssize(bins_);
    std::vector<std::int32_t> members = bins_[best].members;
    members.insert(std::lower_bound(members.begin(), members.end(), sequence), sequence);
    change(best, std::move(members));
}

// Empties two or three bins and inserts their sequences again: in sorted order, but the roots in
// random order.
void TreeSearch::perturb(const Random& chance, std::uint64_t& word) {
    std::vector<std::pair<std::uint64_t, std::int32_t>> removed;
    const Random roots = chance.child(word++);
    for (std::uint64_t n = 2 + chance.below(word++, 2); n > 0; --n) {
        const auto b = static_cast<std::int64_t>(chance.below(word++, bins_.size()));
        const std::int64_t size = ssize(bins_[b].members);
        if (size * (size + ssize(bins_)) > budget_) continue;  // the insertions take too long
        for (const std::int32_t sequence : bins_[b].members)
            removed.push_back({roots.word(forest_.root(sequence)), sequence});
        change(b, {});
    }
    std::sort(removed.begin(), removed.end());
    if (chance.below(word++, 2) == 0) std::reverse(removed.begin(), removed.end());
    for (const auto& [key, sequence] : removed) insert(sequence);
    budget_ -= forest_.size();  // for the copies of all bins
}

void TreeSearch::minimize(std::int64_t cap, bool balanced, std::int64_t budget) {
    cap_ = cap;
    balanced_ = balanced;
    budget_ = budget;
    // A bin may stay above the cap by less than a move would repeat.
    std::vector<TreeBin> fitting;
    if (fits(cap)) fitting = bins_;
    find_tops();
    // A small weight first: branches that leave a full bin should not repeat long prefixes.
    for (above_weight_ = balanced ? kMostAbove : 2; above_weight_ < kMostAbove; above_weight_ *= 8)
        descend();
    descend();
    if (balanced) {
        arrange();
        descend();
    }
    // The least possible objective: one trie, and no rank waits.
    const std::int64_t least =
        forest_.all().tokens * token_cost_ + (balanced ? forest_.all().cost : 0);
    const Random chance(0);
    std::uint64_t word = 0;
    std::int64_t best = objective();
    std::vector<TreeBin> best_bins = bins_;
    for (std::int64_t failures = 0; failures < kMostFailures && budget_ > 0 && ssize(bins_) > 1 &&
                                    best > least && (balanced || !fits(cap));
         ++failures) {
        std::vector<TreeBin> before = bins_;
        perturb(chance, word);
        descend();
        const std::int64_t now = objective();
        if (now < best && (!balanced || fits(cap))) {
            failures = 0;
            best = now;
            best_bins = bins_;
        } else if (now > best + least / kTolerance) {
            bins_ = std::move(before);
            find_tops();
        }
    }
    bins_ = std::move(best_bins);
    if (!fitting.empty() && !fits(cap)) bins_ = std::move(fitting);
    find_tops();
    if (balanced) arrange();
}

}  // namespace megapack
