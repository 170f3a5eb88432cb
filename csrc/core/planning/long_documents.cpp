#include "core/planning/long_documents.hpp"

#include <algorithm>
#include <limits>

namespace megapack {
namespace {

constexpr std::int64_t kNone = -1;

// One micro batch whose ranks should have mean_squares of attention each.
class MicroBatch {
  public:
    MicroBatch(Groups& groups, std::int64_t number, std::int64_t mean_squares,
               std::int64_t least_degree)
        : groups_(groups),
          number_(number),
          mean_squares_(mean_squares),
          least_degree_(least_degree),
          first_group_(groups.size()),
          empty_wish_(mean_squares / groups.mean_tokens()) {}

    // To the group that wishes for the longest documents; a new one wishes most. False: no room.
    bool place(const Document& document) {
        const std::int64_t degree = degree_of(document);
        std::int64_t best = kNone, most = std::numeric_limits<std::int64_t>::min();
        for (std::int64_t i = 0; i < ssize(state_); ++i) {
            const State& state = state_[i];
            if (state.wish <= most || document.length > state.room || state.degree < degree)
                continue;
            best = i;
            most = state.wish;
        }
        if (groups_.free_ranks(number_) >= degree && (best == kNone || most < empty_wish_)) {
            best = ssize(state_);
            open(degree);
        }
        if (best == kNone) return false;
        groups_.place(document, first_group_ + best);
        update(best);
        return true;
    }

    void open_the_rest() {
        std::int64_t degree = least_degree_;
        while (groups_.free_ranks(number_) > 0) {
            while (degree > groups_.free_ranks(number_)) degree /= 2;
            open(degree);
        }
    }

  private:
    struct State {
        std::int64_t wish, room, degree;
    };

    // The fewest ranks that hold the document and get at most half of the attention from it that
    // they should have: other documents then make up for what cannot be divided evenly. Where the
    // linear layers cost far more, a small share of their cost counts as attention.
    std::int64_t degree_of(const Document& document) const {
        const StepRules& rules = groups_.rules();
        std::int64_t degree = least_degree_;
        const std::int64_t linear = rules.linear_length * groups_.mean_tokens();
        const std::int64_t largest_share = (mean_squares_ + linear / 32) / 2;
        while (document.length > degree * rules.max_tokens) degree *= 2;
        while (degree < rules.max_degree && document.square() / degree > largest_share) degree *= 2;
        return degree;
    }

    void open(std::int64_t degree) {
        groups_.open(number_, degree);
        state_.push_back({0, 0, degree});
        update(ssize(state_) - 1);
    }

    // Documents of length `wish` would give a group the attention and the tokens that it misses.
    // It keeps a little room for the short ones, with which all groups are filled exactly.
    void update(std::int64_t i) {
        const std::int64_t g = first_group_ + i, mean_tokens = groups_.mean_tokens();
        const Group& group = groups_[g];
        const std::int64_t tokens = groups_.missing(g, mean_tokens);
        const std::int64_t squares = group.degree * mean_squares_ - group.squares;
        state_[i].wish = squares / std::max<std::int64_t>(tokens, 1);
        state_[i].room = groups_.room(g);
        if (group.documents > 0)
            state_[i].room = std::min(state_[i].room, tokens - mean_tokens / 16);
    }

    Groups& groups_;
    std::int64_t number_, mean_squares_, least_degree_, first_group_, empty_wish_;
    std::vector<State> state_;
};

}  // namespace

std::vector<Document> deal_long(Groups& groups, const std::vector<Document>& documents,
                                std::int64_t least_degree) {
    std::int64_t tokens_left = 0;
    for (const Document& document : documents) tokens_left += document.length;
    std::vector<Document> left = documents, later;
    for (std::int64_t m = 0; m < groups.num_micro_batches(); ++m) {
        const std::int64_t to_come = groups.num_micro_batches() - m;
        const std::int64_t share = (tokens_left + to_come - 1) / to_come;
        std::int64_t tokens = 0, squares = 0;
        for (std::int64_t i = 0; i < ssize(left) && tokens < share; ++i) {
            tokens += left[i].length;
            squares += left[i].square();
        }
        MicroBatch micro_batch(groups, m, squares / groups.rules().num_ranks, least_degree);
        tokens = 0;
        later.clear();
        for (const Document& document : left) {
            if (tokens < share && micro_batch.place(document)) {
                tokens += document.length;
            } else {
                later.push_back(document);
            }
        }
        micro_batch.open_the_rest();
        tokens_left -= tokens;
        left.swap(later);
    }
    return left;
}

}  // namespace megapack
