#include "core/planning/sharing.hpp"

#include <algorithm>
#include <limits>
#include <queue>
#include <utility>

namespace megapack {
namespace {

// ---- long documents make the attention: like lengths in a micro batch, ranks with as much each
// ----

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

// ---- documents that are left, found by their length: a few whose lengths make an exact sum
// --------

class Pool {
  public:
    explicit Pool(Span<const Document> documents);  // longest first; kept alive by the caller

    std::int64_t size() const { return size_; }
    bool has_up_to(std::int64_t length) const { return longest_up_to(length) >= 0; }
    Document take_longest(std::int64_t length) { return take(longest_up_to(length)); }

    // One, two or three documents (at most `count`) whose lengths sum to `sum`; none if none do.
    std::vector<Document> take_sum(std::int64_t sum, std::int64_t count);

    // All that are left, longest first.
    std::vector<Document> rest();

  private:
    // A kind is one of the lengths, shortest first.
    std::int64_t longest_up_to(std::int64_t length) const;
    std::int64_t kind_of(std::int64_t length) const;
    bool has(std::int64_t kind) const { return kind >= 0 && count_[kind] > 0; }
    std::pair<std::int64_t, std::int64_t> pair_of_sum(std::int64_t sum) const;
    Document take(std::int64_t kind);

    Span<const Document> documents_;
    std::vector<std::int64_t> length_, end_, count_;  // per kind; its documents end at end_
    std::vector<std::int32_t> kind_;                  // per length from length_[0] on, -1 for none
    std::int64_t longest_ = -1, size_ = 0;            // the longest kind that is left
};

Pool::Pool(Span<const Document> documents) : documents_(documents), size_(documents.size()) {
    for (std::int64_t i = size_ - 1; i >= 0; --i) {
        if (length_.empty() || length_.back() != documents[i].length) {
            length_.push_back(documents[i].length);
            end_.push_back(i + 1);
            count_.push_back(0);
        }
        ++count_.back();
    }
    longest_ = ssize(length_) - 1;
    if (length_.empty()) return;
    kind_.assign(length_.back() - length_[0] + 1, -1);
    for (std::int64_t k = 0; k <= longest_; ++k)
        kind_[length_[k] - length_[0]] = static_cast<std::int32_t>(k);
}

std::int64_t Pool::longest_up_to(std::int64_t length) const {
    const auto above = std::upper_bound(length_.begin(), length_.begin() + longest_ + 1, length);
    std::int64_t kind = above - length_.begin() - 1;
    while (kind >= 0 && count_[kind] == 0) --kind;
    return kind;
}

std::int64_t Pool::kind_of(std::int64_t length) const {
    const std::int64_t at = length - length_[0];
    return at < 0 || at >= ssize(kind_) ? -1 : kind_[at];
}

// Two kinds near to each other, so that short ones are left for the last groups.
std::pair<std::int64_t, std::int64_t> Pool::pair_of_sum(std::int64_t sum) const {
    for (std::int64_t k = longest_up_to(sum / 2); k >= 0; --k) {
        const std::int64_t rest = sum - length_[k];
        if (rest > length_[longest_]) break;
        const std::int64_t other = kind_of(rest);
        if (has(k) && has(other) && (other != k || count_[k] > 1)) return {k, other};
    }
    return {-1, -1};
}

std::vector<Document> Pool::take_sum(std::int64_t sum, std::int64_t count) {
    constexpr int kTries = 8;
    if (size_ == 0 || sum > count * length_[longest_]) return {};
    if (has(kind_of(sum))) return {take(kind_of(sum))};
    if (count < 2) return {};
    if (const auto [k, other] = pair_of_sum(sum); k >= 0) return {take(k), take(other)};
    if (count < 3) return {};
    std::int64_t first = longest_up_to(sum - 2 * length_[0]);
    for (int i = 0; i < kTries && first >= 0; ++i) {
        --count_[first];
        const auto [k, other] = pair_of_sum(sum - length_[first]);
        ++count_[first];
        if (k >= 0) return {take(first), take(k), take(other)};
        first = longest_up_to(length_[first] - 1);
    }
    return {};
}

std::vector<Document> Pool::rest() {
    std::vector<Document> documents;
    while (size_ > 0) documents.push_back(take(longest_));
    return documents;
}

Document Pool::take(std::int64_t kind) {
    --size_;
    const Document document = documents_[end_[kind] - count_[kind]--];
    while (longest_ >= 0 && count_[longest_] == 0) --longest_;
    return document;
}

// ---- short documents fill every rank of every micro batch to the same number of tokens
// ------------

// Deals each document to the group whose ranks miss most tokens; false where one has no room.
bool deal_to_emptiest(Groups& groups, Span<const Document> documents) {
    using Entry = std::pair<std::int64_t, std::int64_t>;  // tokens missing per rank, -group
    const auto entry = [&](std::int64_t g) {
        return Entry{groups.missing(g, groups.mean_tokens()) / groups[g].degree, -g};
    };
    std::vector<Entry> entries;
    for (std::int64_t g = 0; g < groups.size(); ++g) entries.push_back(entry(g));
    std::priority_queue<Entry> emptiest(entries.begin(), entries.end());
    std::vector<Entry> aside;
    for (const Document& document : documents) {
        while (!emptiest.empty() && document.length > groups.room(-emptiest.top().second)) {
            aside.push_back(emptiest.top());
            emptiest.pop();
        }
        if (emptiest.empty()) return false;
        const std::int64_t g = -emptiest.top().second;
        emptiest.pop();
        groups.place(document, g);
        emptiest.push(entry(g));
        for (const Entry& other : aside) emptiest.push(other);
        aside.clear();
    }
    return true;
}

// Fills a group to `per_rank` tokens: down to what three documents can make, then exactly, or as
// nearly as 16 tokens.
void fill(Groups& groups, std::int64_t g, std::int64_t per_rank, Pool& pool) {
    constexpr std::int64_t kWaste = 16;
    while (pool.size() > 0) {
        const std::int64_t missing = std::min(groups.missing(g, per_rank), groups.room(g));
        const std::int64_t places = groups.rules().max_documents - groups[g].documents;
        for (std::int64_t sum = missing; sum > missing - kWaste; --sum) {
            const auto found = pool.take_sum(sum, std::min<std::int64_t>(places, 3));
            for (const Document& document : found) groups.place(document, g);
            if (!found.empty()) return;
        }
        if (!pool.has_up_to(missing)) return;
        groups.place(pool.take_longest(missing), g);
    }
}

bool deal_short(Groups& groups, const std::vector<Document>& documents) {
    const std::int64_t size = ssize(documents), kept = std::min(size, 3 * groups.size() + 1024);
    if (!deal_to_emptiest(groups, {documents.data(), size - kept})) return false;

    // Those that miss least first: they have the fewest ways to be filled. What room there is in
    // excess is left together, in the last groups.
    std::vector<std::pair<std::int64_t, std::int64_t>> order;
    for (std::int64_t g = 0; g < groups.size(); ++g)
        order.push_back({groups.missing(g, groups.mean_tokens()) / groups[g].degree, g});
    std::sort(order.begin(), order.end());
    Pool pool({documents.data() + size - kept, kept});
    const std::int64_t mean = groups.mean_tokens();
    const std::int64_t per_rank = std::min(groups.rules().max_tokens, mean + mean / 512);
    for (const auto& [missing, g] : order) fill(groups, g, per_rank, pool);
    return deal_to_emptiest(groups, pool.rest());
}

}  // namespace

bool deal_shared(Groups& groups, const std::vector<Document>& longest_first, std::int64_t num_long,
                 std::int64_t least_degree) {
    const auto split = longest_first.begin() + num_long;
    std::vector<Document> rest = deal_long(groups, {longest_first.begin(), split}, least_degree);
    rest.insert(rest.end(), split, longest_first.end());
    return deal_short(groups, rest);
}

}  // namespace megapack
