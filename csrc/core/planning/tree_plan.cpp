// plan_trees: cut the sorted sequences into runs by dynamic programming, put the runs into bins (the
// tree of a rank in a micro batch), then move and exchange branches between bins.
//
// In sorted order, the tokens of any set of sequences are the sum over its sequences of their length
// minus what they share with the sequence before; the same holds for costs. So the effect of a move
// follows from a few neighbors.
#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "core/base/check.hpp"
#include "core/base/random.hpp"
#include "core/planning/trees.hpp"

namespace megapack {
namespace {

constexpr std::int64_t kNone = -1;
constexpr std::int64_t kMostPlaces = std::int64_t{1} << 24;  // ranks times micro batches
// Upper bound of ranks times the integer cost of all sequences.
constexpr std::int64_t kWorkOfAll = std::int64_t{1} << 52;
// Moves to evaluate. More of them would cost more time than they save.
constexpr std::int64_t kMoves = std::int64_t{1} << 21;
constexpr std::int64_t kMostFailures = 256;  // attempts without an improvement
constexpr std::int64_t kMostBlocks = 64;     // branches of a bin that may move
constexpr std::int64_t kMostPartners = 16;   // bins that a bin exchanges branches with

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
    return (a + b - 1) / b;
}

struct Amount {
    std::int64_t tokens = 0, cost = 0;

    Amount operator+(const Amount& o) const { return {tokens + o.tokens, cost + o.cost}; }
    Amount operator-(const Amount& o) const { return {tokens - o.tokens, cost - o.cost}; }
    void operator+=(const Amount& o) { *this = *this + o; }
};

// ---- Sequences in sorted order

class Forest {
  public:
    Forest(Span<const std::int64_t> lengths, Span<const std::int64_t> shared,
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
            for (std::int64_t k = 0; k < ssize(row); ++k)
                row[k] = std::min(half[k], half[k + width]);
            least_.push_back(std::move(row));
        }
    }

    std::int64_t size() const { return ssize(whole_); }
    std::int64_t length(std::int64_t k) const { return whole_[k].tokens; }
    const Amount& whole(std::int64_t k) const { return whole_[k]; }
    const Amount& all() const { return all_; }  // one trie of all sequences
    std::int32_t root(std::int64_t k) const { return root_[k]; }
    Amount prefix(std::int64_t n) const { return {n, (n * (n + linear_cost_tokens_)) >> shift_}; }
    // Returns the tokens that sequences i < j share; kNone: no sequence.
    std::int64_t shared(std::int64_t i, std::int64_t j) const {
        if (i == kNone || j == kNone || root_[i] != root_[j]) return 0;
        const int level = 63 - __builtin_clzll(static_cast<unsigned long long>(j - i));
        return std::min(least_[level][i + 1], least_[level][j + 1 - (std::int64_t{1} << level)]);
    }
    Amount common(std::int64_t i, std::int64_t j) const { return prefix(shared(i, j)); }

  private:
    std::int64_t linear_cost_tokens_;
    int shift_ = 0;
    std::vector<Amount> whole_;
    std::vector<std::int32_t> root_;
    Amount all_;
    std::vector<std::vector<std::int32_t>> least_;  // [level][k]: of shared[k, k + 2^level)
};

struct Run {
    std::int64_t begin, end;  // of the given sequences
    Amount sum;
};

// Cuts sequences into runs of at most `cap` tokens with the fewest repeated tokens: a cut before a
// sequence repeats what it shares with the one before. Among equal cuts it chooses the last, so
// that one run is full and the other one short.
std::vector<Run> cut(const Forest& forest, Span<const std::int32_t> sequences, std::int64_t cap) {
    const std::int64_t n = sequences.size();
    const auto common = [&](std::int64_t k) {
        return forest.common(k == 0 ? kNone : sequences[k - 1], sequences[k]);
    };
    // A run i..k has begin[k + 1] - begin[i] + (what i shares with i - 1) tokens.
    std::vector<Amount> begin(n + 1);
    std::vector<std::int64_t> best(n + 1, 0), first(n + 1, 0), window;
    std::int64_t oldest = 0;  // of the window: starts in order of rising cost
    for (std::int64_t k = 0; k < n; ++k) {
        const auto cost = [&](std::int64_t i) { return best[i] + common(i).tokens; };
        begin[k + 1] = begin[k] + forest.whole(sequences[k]) - common(k);
        while (ssize(window) > oldest && cost(window.back()) >= cost(k)) window.pop_back();
        window.push_back(k);
        while ((begin[k + 1] - begin[window[oldest]] + common(window[oldest])).tokens > cap)
            ++oldest;
        first[k + 1] = window[oldest];
        best[k + 1] = cost(window[oldest]);
    }
    std::vector<Run> runs;
    for (std::int64_t end = n; end > 0; end = first[end])
        runs.push_back({first[end], end, begin[end] - begin[first[end]] + common(first[end])});
    return runs;
}

// ---- Bins

// A branch of a bin's tree: members [begin, end).
struct Block {
    std::int32_t begin, end;
    Amount freed, alone;  // what its removal saves; its cost without other members
};

struct Bin {
    std::vector<std::int32_t> members;  // sequences, ascending
    Amount sum;
    std::vector<Block> blocks;
    std::vector<std::int32_t> roots;
};

bool share_a_root(const Bin& a, const Bin& b) {
    auto i = a.roots.begin(), j = b.roots.begin();
    while (i != a.roots.end() && j != b.roots.end()) {
        if (*i == *j) return true;
        *i < *j ? ++i : ++j;
    }
    return false;
}

// Local search. A path is the sum over barriers of the busiest member's cost, as in plan_step: the
// members of a barrier are the trees of a micro batch, the ranks, or all trees (pipeline).
class Search {
  public:
    Search(const Forest& forest, const TreeRules& rules, std::int64_t num_micro_batches)
        : forest_(forest),
          ranks_(rules.num_ranks),
          balance_(rules.balance),
          bins_(num_micro_batches * rules.num_ranks),
          load_(balance_ == Balance::kStep ? ranks_ : ssize(bins_)),
          tops_(balance_ == Balance::kMicroBatches ? num_micro_batches : 1),
          token_cost_(std::max<std::int64_t>(1, forest.all().cost / forest.all().tokens)) {}

    // Puts runs into bins, longest first: into the fullest bin with room; else into the emptiest.
    void assign(std::vector<Run> runs, std::int64_t cap);
    // Minimizes tokens above `cap`, then all tokens; with `balanced` also the path.
    void minimize(std::int64_t cap, bool balanced, std::int64_t budget);
    // Makes micro batches of bins with similar cost; the most expensive goes to the rank with the
    // least cost so far.
    void arrange();

    bool fits(std::int64_t cap) const {
        return std::all_of(bins_.begin(), bins_.end(),
                           [&](const Bin& bin) { return bin.sum.tokens <= cap; });
    }
    const std::vector<Bin>& bins() const { return bins_; }
    std::int64_t objective() const {
        std::int64_t above = 0, tokens = 0, path = 0;
        for (const Bin& bin : bins_) {
            tokens += bin.sum.tokens;
            above += std::max<std::int64_t>(0, bin.sum.tokens - cap_);
        }
        for (const Top& top : tops_) path += top.cost[0];
        return (kAbove * above + tokens) * token_cost_ + (balanced_ ? ranks_ * path : 0);
    }

  private:
    static constexpr std::int64_t kAbove = 64;  // weight of a token above the cap

    struct Top {  // the three members of a barrier with the largest cost
        std::int64_t member[3] = {kNone, kNone, kNone}, cost[3] = {0, 0, 0};
    };
    struct Move {  // of a block of bin `from`, for a block of bin `to` or for none
        std::int64_t gain = 0, from = kNone, give = 0, to = 0, get = kNone;
    };

    std::int64_t member_of(std::int64_t b) const {
        return balance_ == Balance::kStep ? b % ranks_ : b;
    }
    std::int64_t barrier_of(std::int64_t b) const {
        return balance_ == Balance::kMicroBatches ? b / ranks_ : 0;
    }
    std::int64_t above(std::int64_t tokens) const {
        return std::max<std::int64_t>(0, tokens - cap_);
    }

    void refresh(Bin& bin) const;
    void find_tops();
    void find_top(std::int64_t barrier);
    bool improve(std::int64_t b);
    std::vector<std::int64_t> partners_of(std::int64_t b, bool any);
    void evaluate(std::int64_t from, std::int64_t to, bool exchange, Move& best);
    std::int64_t gain_of(std::int64_t a, const Amount& more_a, std::int64_t b,
                         const Amount& more_b) const;
    std::int64_t path_gain(std::int64_t a, std::int64_t more_a, std::int64_t b,
                           std::int64_t more_b) const;
    Amount added(const Bin& from, const Block& block, const Bin& to, const Block* without) const;
    void apply(const Move& move);
    void change(std::int64_t b, std::vector<std::int32_t> members);
    void descend();
    bool perturb(const Random& chance, std::uint64_t& word);
    void insert(std::int32_t sequence);

    const Forest& forest_;
    std::int64_t ranks_;
    Balance balance_;
    std::vector<Bin> bins_;  // bin b: micro batch b / ranks, rank b % ranks
    std::vector<std::int64_t> load_;  // cost per member
    std::vector<Top> tops_;           // per barrier
    std::int64_t token_cost_;         // mean cost of a token
    std::int64_t cap_ = 0, budget_ = 0;
    bool balanced_ = false;
};

void Search::assign(std::vector<Run> runs, std::int64_t cap) {
    std::stable_sort(runs.begin(), runs.end(), [](const Run& a, const Run& b) {
        return std::pair(-a.sum.tokens, a.begin) < std::pair(-b.sum.tokens, b.begin);
    });
    std::set<std::pair<std::int64_t, std::int64_t>> fullest;  // (-tokens, bin)
    for (std::int64_t b = 0; b < ssize(bins_); ++b) fullest.emplace(0, b);
    for (const Run& run : runs) {
        auto at = fullest.lower_bound({run.sum.tokens - cap, 0});
        if (at == fullest.end()) --at;
        const auto [tokens, b] = *at;
        fullest.erase(at);
        fullest.emplace(tokens - run.sum.tokens, b);
        for (std::int64_t k = run.begin; k < run.end; ++k)
            bins_[b].members.push_back(static_cast<std::int32_t>(k));
    }
    for (Bin& bin : bins_) {
        std::sort(bin.members.begin(), bin.members.end());
        refresh(bin);
    }
}

// Recomputes the sum and the blocks of a bin: its sequences, and the members of each inner node.
void Search::refresh(Bin& bin) const {
    const std::int64_t n = ssize(bin.members);
    const auto member = [&](std::int64_t k) {
        return k < 0 || k >= n ? kNone : std::int64_t{bin.members[k]};
    };
    std::vector<std::int64_t> shared(n + 1, 0);
    std::vector<Amount> begin(n + 1);
    bin.roots.clear();
    bin.blocks.clear();
    for (std::int64_t k = 0; k < n; ++k) {
        shared[k] = forest_.shared(member(k - 1), member(k));
        begin[k + 1] = begin[k] + forest_.whole(member(k)) - forest_.prefix(shared[k]);
        if (shared[k] == 0) bin.roots.push_back(forest_.root(member(k)));
    }
    bin.sum = begin[n];
    const auto add = [&](std::int64_t i, std::int64_t j) {
        const Amount sum = begin[j] - begin[i];
        const Amount joined = forest_.common(member(i - 1), member(j));
        bin.blocks.push_back({static_cast<std::int32_t>(i), static_cast<std::int32_t>(j),
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
    if (ssize(bin.blocks) > kMostBlocks) {  // keep some of every size
        std::stable_sort(
            bin.blocks.begin(), bin.blocks.end(),
            [](const Block& a, const Block& b) { return a.freed.tokens > b.freed.tokens; });
        for (std::int64_t k = 0; k < kMostBlocks; ++k)
            bin.blocks[k] = bin.blocks[k * ssize(bin.blocks) / kMostBlocks];
        bin.blocks.resize(kMostBlocks);
    }
}

void Search::arrange() {
    std::vector<std::int64_t> order(bins_.size()), load(ranks_, 0), free(ranks_);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
        return bins_[a].sum.cost > bins_[b].sum.cost;
    });
    std::vector<Bin> arranged(bins_.size());
    for (std::int64_t begin = 0; begin < ssize(bins_); begin += ranks_) {
        std::iota(free.begin(), free.end(), 0);
        std::stable_sort(free.begin(), free.end(),
                         [&](std::int64_t a, std::int64_t b) { return load[a] < load[b]; });
        for (std::int64_t i = 0; i < ranks_; ++i) {
            Bin& bin = bins_[order[begin + i]];
            load[free[i]] += bin.sum.cost;
            arranged[begin + free[i]] = std::move(bin);
        }
    }
    bins_ = std::move(arranged);
    find_tops();
}

// ---- Effect of a move

void Search::find_tops() {
    std::fill(load_.begin(), load_.end(), 0);
    for (std::int64_t b = 0; b < ssize(bins_); ++b) load_[member_of(b)] += bins_[b].sum.cost;
    for (std::int64_t i = 0; i < ssize(tops_); ++i) find_top(i);
}

void Search::find_top(std::int64_t barrier) {
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
std::int64_t Search::path_gain(std::int64_t a, std::int64_t more_a, std::int64_t b,
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
std::int64_t Search::gain_of(std::int64_t a, const Amount& more_a, std::int64_t b,
                             const Amount& more_b) const {
    const std::int64_t tokens_a = bins_[a].sum.tokens;
    std::int64_t more = above(tokens_a + more_a.tokens) - above(tokens_a);
    if (b != kNone) {
        const std::int64_t tokens_b = bins_[b].sum.tokens;
        more += above(tokens_b + more_b.tokens) - above(tokens_b);
    }
    const std::int64_t gain = -(kAbove * more + more_a.tokens + more_b.tokens) * token_cost_;
    return balanced_ ? gain + ranks_ * path_gain(a, more_a.cost, b, more_b.cost) : gain;
}

// Returns what the members of a block add to a bin from which another block is removed.
Amount Search::added(const Bin& from, const Block& block, const Bin& to,
                     const Block* without) const {
    const std::int32_t* members = from.members.data();
    const std::int64_t first = members[block.begin], last = members[block.end - 1];
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
        return block.alone - forest_.common(left, first) - forest_.common(last, right) +
               forest_.common(left, right);
    // Members of the bin lie between those of the block: merge both.
    Amount sum;
    std::int64_t merged = left, old = left, j = p;
    const auto pass_old = [&](std::int64_t until) {
        for (; j < q && to.members[j] < until; ++j) {
            if (j >= gap && j < gap_end) continue;
            sum += forest_.common(old, to.members[j]) - forest_.common(merged, to.members[j]);
            merged = old = to.members[j];
        }
    };
    for (std::int64_t i = block.begin; i < block.end; ++i) {
        pass_old(members[i]);
        sum += forest_.whole(members[i]) - forest_.common(merged, members[i]);
        merged = members[i];
    }
    return sum + forest_.common(old, right) - forest_.common(merged, right);
}

// ---- Search

// Evaluates the move of every block of a bin to another one; with `exchange`, also the exchange for
// every block of the other one.
void Search::evaluate(std::int64_t from, std::int64_t to, bool exchange, Move& best) {
    const Bin &a = bins_[from], &b = bins_[to];
    const bool related = share_a_root(a, b);
    const std::int64_t num_others = exchange ? ssize(b.blocks) : 0;
    budget_ -= (ssize(a.blocks) + 1) * (num_others + 1) * (related ? 8 : 1);
    for (std::int64_t i = 0; i < ssize(a.blocks); ++i) {
        const Block& give = a.blocks[i];
        const auto consider = [&](std::int64_t j, const Amount& more_a, const Amount& more_b) {
            const std::int64_t gain = gain_of(from, more_a, to, more_b);
            if (gain > best.gain) best = {gain, from, i, to, j};
        };
        const Amount whole = related ? added(a, give, b, nullptr) : give.alone;
        consider(kNone, Amount{} - give.freed, whole);
        for (std::int64_t j = 0; j < num_others; ++j) {
            const Block& get = b.blocks[j];
            const Amount there = related ? added(a, give, b, &get) : give.alone;
            const Amount here = related ? added(b, get, a, &give) : get.alone;
            consider(j, here - give.freed, there - get.freed);
        }
    }
}

// Chooses bins to exchange branches with: those that share a prefix and, with `any`, those that can
// take the most tokens or cost.
std::vector<std::int64_t> Search::partners_of(std::int64_t b, bool any) {
    std::vector<std::int64_t> partners, others;
    for (std::int64_t other = 0; other < ssize(bins_); ++other) {
        if (other == b) continue;
        (share_a_root(bins_[b], bins_[other]) ? partners : others).push_back(other);
    }
    budget_ -= ssize(bins_);
    if (!any) return partners;
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
bool Search::improve(std::int64_t b) {
    const bool busiest = balanced_ && load_[member_of(b)] == tops_[barrier_of(b)].cost[0];
    Move best;
    for (const std::int64_t other :
         partners_of(b, busiest || bins_[b].sum.tokens > cap_ || bins_[b].members.empty())) {
        evaluate(b, other, true, best);
        evaluate(other, b, false, best);
    }
    if (best.from == kNone) return false;
    apply(best);
    return true;
}

void Search::apply(const Move& move) {
    const auto without = [](const Bin& bin, const Block* block) {
        std::vector<std::int32_t> members = bin.members;
        if (block != nullptr)
            members.erase(members.begin() + block->begin, members.begin() + block->end);
        return members;
    };
    const auto with = [](std::vector<std::int32_t> members, const Bin& bin, const Block* block) {
        if (block == nullptr) return members;
        const auto size = static_cast<std::ptrdiff_t>(members.size());
        members.insert(members.end(), bin.members.begin() + block->begin,
                       bin.members.begin() + block->end);
        std::inplace_merge(members.begin(), members.begin() + size, members.end());
        return members;
    };
    const Bin &a = bins_[move.from], &b = bins_[move.to];
    const Block* give = &a.blocks[move.give];
    const Block* get = move.get == kNone ? nullptr : &b.blocks[move.get];
    std::vector<std::int32_t> members_a = with(without(a, give), b, get);
    std::vector<std::int32_t> members_b = with(without(b, get), a, give);
    change(move.from, std::move(members_a));
    change(move.to, std::move(members_b));
}

void Search::change(std::int64_t b, std::vector<std::int32_t> members) {
    const std::int64_t before = bins_[b].sum.cost;
    bins_[b].members = std::move(members);
    refresh(bins_[b]);
    budget_ -= 8 * ssize(bins_[b].members);
    load_[member_of(b)] += bins_[b].sum.cost - before;
    find_top(barrier_of(b));
}

void Search::descend() {
    for (bool any = true; any && budget_ > 0;) {
        any = false;
        for (std::int64_t b = 0; b < ssize(bins_) && budget_ > 0; ++b)
            while (budget_ > 0 && improve(b)) any = true;
    }
}

// Puts a sequence into the bin in which it costs least.
void Search::insert(std::int32_t sequence) {
    const Bin alone{{sequence}, {}, {}, {}};
    const Block block{0, 1, {}, forest_.whole(sequence)};
    std::int64_t best = kNone, most = 0;
    for (std::int64_t b = 0; b < ssize(bins_); ++b) {
        const std::int64_t gain = gain_of(b, added(alone, block, bins_[b], nullptr), kNone, {});
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

// Empties two or three bins and inserts their sequences again, in random order.
bool Search::perturb(const Random& chance, std::uint64_t& word) {
    std::vector<std::int32_t> removed;
    for (std::int64_t n = 2 + chance.below(word++, 2); n > 0; --n) {
        const std::int64_t b = chance.below(word++, bins_.size());
        removed.insert(removed.end(), bins_[b].members.begin(), bins_[b].members.end());
        change(b, {});
    }
    for (std::int64_t i = ssize(removed) - 1; i > 0; --i)
        std::swap(removed[i], removed[chance.below(word++, i + 1)]);
    for (const std::int32_t sequence : removed) insert(sequence);
    return !removed.empty();
}

void Search::minimize(std::int64_t cap, bool balanced, std::int64_t budget) {
    cap_ = cap;
    balanced_ = balanced;
    budget_ = budget;
    find_tops();
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
    for (std::int64_t failures = 0; failures < kMostFailures && budget_ > 0 && ssize(bins_) > 1 &&
                                    best > least && (balanced || !fits(cap));
         ++failures) {
        std::vector<Bin> before = bins_;
        if (!perturb(chance, word)) break;
        descend();
        const std::int64_t now = objective();
        if (now < best) {
            failures = 0;
            best = now;
        } else {
            bins_ = std::move(before);
            find_tops();
        }
    }
    if (balanced) arrange();
}

// ---- Plans

// Returns the fewest tokens that trees of `cap` tokens forward: all sequences of a root share a
// prefix, which each of its trees repeats.
std::int64_t least_tokens(const Forest& forest, Span<const std::int64_t> shared, std::int64_t cap) {
    std::int64_t total = 0;
    for (std::int64_t begin = 0, end = 0; begin < forest.size(); begin = end) {
        std::int64_t tokens = forest.length(begin), prefix = tokens;
        for (end = begin + 1; end < forest.size() && shared[end] > 0; ++end) {
            tokens += forest.length(end) - shared[end];
            prefix = std::min(prefix, shared[end]);
        }
        total += tokens;
        if (tokens > cap) total += prefix * (ceil_div(tokens - prefix, cap - prefix) - 1);
    }
    return total;
}

TreePlan plan_of(const std::vector<std::vector<std::int32_t>>& trees, std::int64_t micro_batches) {
    TreePlan plan{micro_batches, {0}, {}};
    for (const std::vector<std::int32_t>& tree : trees) {
        plan.sequences.insert(plan.sequences.end(), tree.begin(), tree.end());
        plan.offsets.push_back(ssize(plan.sequences));
    }
    return plan;
}

// Cuts every group into runs; plan_step assigns them.
TreePlan plan_groups(const Forest& forest, Span<const std::int64_t> groups, std::int64_t cap,
                     const TreeRules& rules) {
    std::map<std::int64_t, std::vector<std::int32_t>> members;
    for (std::int64_t k = 0; k < groups.size(); ++k)
        members[groups[k]].push_back(static_cast<std::int32_t>(k));
    std::vector<std::vector<std::int32_t>> content;
    std::vector<std::int64_t> tokens, group_of_run;
    std::vector<double> costs;
    for (const auto& [group, sequences] : members)
        for (const Run& run : cut(forest, sequences, cap)) {
            content.emplace_back(sequences.begin() + run.begin, sequences.begin() + run.end);
            tokens.push_back(run.sum.tokens);
            costs.push_back(static_cast<double>(run.sum.cost));
            group_of_run.push_back(group);
        }
    const StepRules step{rules.num_ranks, cap, ssize(content), 1, 0, rules.balance, rules.multiple};
    const StepPlan plan = plan_step(tokens, {costs, {}}, group_of_run, step);
    std::vector<std::vector<std::int32_t>> trees(plan.num_micro_batches * rules.num_ranks);
    for (std::int64_t i = 0; i < ssize(content); ++i) {
        auto& tree = trees[plan.micro_batch[i] * rules.num_ranks + plan.first_rank[i]];
        tree.insert(tree.end(), content[i].begin(), content[i].end());
    }
    for (auto& tree : trees) std::sort(tree.begin(), tree.end());
    return plan_of(trees, plan.num_micro_batches);
}

}  // namespace

TreePlan plan_trees(Span<const std::int64_t> lengths, Span<const std::int64_t> shared,
                    Span<const std::int64_t> groups, const TreeRules& rules) {
    if (lengths.empty()) return {0, {0}, {}};
    const std::int64_t cap = rules.max_tokens / rules.token_multiple * rules.token_multiple;
    const Forest forest(lengths, shared, rules.linear_cost_tokens, rules.num_ranks);
    if (!groups.empty()) return plan_groups(forest, groups, cap, rules);
    std::vector<std::int32_t> everything(lengths.size());
    std::iota(everything.begin(), everything.end(), 0);
    const std::int64_t least = least_tokens(forest, shared, cap);
    const std::int64_t longest = *std::max_element(lengths.begin(), lengths.end());
    const auto rounded = [&](std::int64_t m) { return ceil_div(m, rules.multiple) * rules.multiple; };
    for (std::int64_t m = rounded(ceil_div(ceil_div(least, cap), rules.num_ranks));;
         m = rounded(m + 1 + m / 16)) {
        check(m <= kMostPlaces / rules.num_ranks, rules.num_ranks, " ranks (num_ranks) of ", m,
              " micro batches give ", m * rules.num_ranks, " places for trees; the limit is ",
              kMostPlaces, ": lower num_ranks or micro_batch_multiple, or raise ",
              "max_tokens_per_rank");
        // With free places, smaller trees balance better.
        std::vector<std::int64_t> targets{cap};
        const std::int64_t mean = ceil_div(least, m * rules.num_ranks);
        const std::int64_t smaller = std::max(longest, mean + mean / 16);
        if (rules.num_ranks > 1 && smaller < cap - cap / 16) targets.push_back(smaller);
        std::vector<Search> found;
        for (const std::int64_t target : targets) {
            Search search(forest, rules, m);
            search.assign(cut(forest, everything, target), target);
            search.minimize(target, false, kMoves / 2);
            if (!search.fits(cap)) continue;
            search.arrange();
            search.minimize(cap, true, kMoves / 2);
            found.push_back(std::move(search));
        }
        if (found.empty()) continue;
        const auto best = std::min_element(
            found.begin(), found.end(),
            [](const Search& a, const Search& b) { return a.objective() < b.objective(); });
        std::vector<std::vector<std::int32_t>> trees;
        for (const Bin& bin : best->bins()) trees.push_back(bin.members);
        return plan_of(trees, m);
    }
}

}  // namespace megapack
