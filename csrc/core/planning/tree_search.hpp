// Branches of sequences in bins, the trees of ranks in micro batches: the sum of any set of
// sequences, and a local search.
//
// In sorted order, the tokens of a set of sequences are the sum over its sequences of their length
// minus what they share with the sequence before; the same holds for costs. So the effect of a move
// follows from a few neighbors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/base/random.hpp"
#include "core/planning/trees.hpp"

namespace megapack {

inline constexpr std::int64_t kNoSequence = -1;

struct Amount {
    std::int64_t tokens = 0, cost = 0;

    Amount operator+(const Amount& o) const { return {tokens + o.tokens, cost + o.cost}; }
    Amount operator-(const Amount& o) const { return {tokens - o.tokens, cost - o.cost}; }
    void operator+=(const Amount& o) { *this = *this + o; }
};

// All sequences in sorted order.
class Forest {
  public:
    Forest(Span<const std::int64_t> lengths, Span<const std::int64_t> shared,
           std::int64_t linear_cost_tokens, std::int64_t num_ranks);

    std::int64_t size() const { return ssize(whole_); }
    std::int64_t length(std::int64_t k) const { return whole_[k].tokens; }
    const Amount& whole(std::int64_t k) const { return whole_[k]; }
    const Amount& all() const { return all_; }  // one trie of all sequences
    std::int32_t root(std::int64_t k) const { return root_[k]; }
    Amount prefix(std::int64_t n) const { return {n, (n * (n + linear_cost_tokens_)) >> shift_}; }
    // Returns the tokens that sequences i < j share; kNoSequence: no sequence.
    std::int64_t shared(std::int64_t i, std::int64_t j) const {
        if (i == kNoSequence || j == kNoSequence || root_[i] != root_[j]) return 0;
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

struct TreeRun {
    std::int64_t begin, end;  // of the given sequences
    Amount sum;
};

// A branch of a bin's tree: members [begin, end).
struct Branch {
    std::int32_t begin, end;
    Amount freed, alone;  // what its removal saves; its cost without other members
};

struct TreeBin {
    std::vector<std::int32_t> members;  // sequences, ascending
    Amount sum;
    std::vector<Branch> branches;
    std::vector<std::int32_t> roots;
};

// Local search. A path is the sum over barriers of the busiest member's cost, as in plan_step: the
// members of a barrier are the trees of a micro batch, the ranks, or all trees (pipeline).
class TreeSearch {
  public:
    TreeSearch(const Forest& forest, const TreeRules& rules, std::int64_t num_micro_batches)
        : forest_(forest),
          ranks_(rules.num_ranks),
          balance_(rules.balance),
          bins_(num_micro_batches * rules.num_ranks),
          changed_(bins_.size(), true),
          load_(balance_ == Balance::kStep ? ranks_ : ssize(bins_)),
          tops_(balance_ == Balance::kMicroBatches ? num_micro_batches : 1),
          token_cost_(std::max<std::int64_t>(1, forest.all().cost / forest.all().tokens)) {}

    // Puts runs into bins, longest first: into the fullest bin with room; else into the emptiest.
    void assign(std::vector<TreeRun> runs, std::int64_t cap);
    // Minimizes tokens above `cap`, then all tokens; with `balanced` also the path.
    void minimize(std::int64_t cap, bool balanced, std::int64_t budget);
    // Makes micro batches of bins with similar cost; the most expensive goes to the rank with the
    // least cost so far.
    void arrange();

    bool fits(std::int64_t cap) const {
        return std::all_of(bins_.begin(), bins_.end(),
                           [&](const TreeBin& bin) { return bin.sum.tokens <= cap; });
    }
    // True if ranks wait for more than 1/32 of their time.
    bool waits() const {
        std::int64_t cost = 0, path = 0;
        for (const TreeBin& bin : bins_) cost += bin.sum.cost;
        for (const Top& top : tops_) path += top.cost[0];
        return ranks_ * path - cost > cost / 32;
    }
    const std::vector<TreeBin>& bins() const { return bins_; }
    std::int64_t objective() const {
        std::int64_t above = 0, tokens = 0, path = 0;
        for (const TreeBin& bin : bins_) {
            tokens += bin.sum.tokens;
            above += std::max<std::int64_t>(0, bin.sum.tokens - cap_);
        }
        for (const Top& top : tops_) path += top.cost[0];
        return (above_weight_ * above + tokens) * token_cost_ + (balanced_ ? ranks_ * path : 0);
    }

  private:
    struct Top {  // the three members of a barrier with the largest cost
        std::int64_t member[3] = {kNoSequence, kNoSequence, kNoSequence}, cost[3] = {0, 0, 0};
    };
    struct Move {  // of a branch of bin `from`, for a branch of bin `to` or for none
        std::int64_t gain = 0, from = kNoSequence, give = 0, to = 0, get = kNoSequence;
    };
    // What a branch adds to a bin, and the members of the bin that decide it.
    struct Entry {
        Amount whole;
        std::int64_t left, right;

        bool touches(const Branch& other) const { return other.begin <= right && other.end > left; }
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

    // True if the bin lengthens the path or exceeds the cap.
    bool is_urgent(std::int64_t b) const {
        return bins_[b].sum.tokens > cap_ ||
               (balanced_ && load_[member_of(b)] == tops_[barrier_of(b)].cost[0]);
    }
    void refresh(TreeBin& bin) const;
    void find_tops();
    void find_top(std::int64_t barrier);
    bool improve(std::int64_t b);
    std::vector<std::int64_t> partners_of(std::int64_t b);
    void evaluate(std::int64_t from, std::int64_t to, bool exchange, Move& best);
    std::int64_t gain_of(std::int64_t a, const Amount& more_a, std::int64_t b,
                         const Amount& more_b) const;
    std::int64_t path_gain(std::int64_t a, std::int64_t more_a, std::int64_t b,
                           std::int64_t more_b) const;
    Amount added(const TreeBin& from, const Branch& branch, const TreeBin& to,
                 const Branch* without) const;
    Entry entry(const TreeBin& from, const Branch& branch, const TreeBin& to) const;
    void apply(const Move& move);
    void change(std::int64_t b, std::vector<std::int32_t> members);
    void descend();
    void perturb(const Random& chance, std::uint64_t& word);
    void insert(std::int32_t sequence);

    const Forest& forest_;
    std::int64_t ranks_;
    Balance balance_;
    std::vector<TreeBin> bins_;       // bin b: micro batch b / ranks, rank b % ranks
    std::vector<bool> changed_;       // per bin: since it was last searched in vain
    std::vector<std::int64_t> load_;  // cost per member
    std::vector<Top> tops_;           // per barrier
    std::int64_t token_cost_;         // mean cost of a token
    std::int64_t cap_ = 0, budget_ = 0, above_weight_ = 0;  // weight of a token above the cap
    bool balanced_ = false;
};

}  // namespace megapack
