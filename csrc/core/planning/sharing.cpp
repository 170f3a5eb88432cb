// Documents that several ranks share. Groups of ranks are opened for long documents, so that ranks
// have equal attention (MicroBatch), then filled with short ones to equal tokens (Pool).
#include <algorithm>
#include <limits>
#include <queue>
#include <utility>
#include <vector>

#include "core/base/span.hpp"
#include "core/planning/assignment.hpp"

namespace megapack {
namespace {

constexpr std::int64_t kNone = -1;

// An item: number, tokens, attention.
struct Document {
    std::int64_t length, square, id;
};

// Returns the items sorted by the number of ranks that they need, largest first (costs may be
// capped), then by length, longest first, then by number, smallest first.
std::vector<Document> longest_first(const Items& items, const StepRules& rules) {
    std::vector<Document> documents;
    std::vector<std::int64_t> degree(items.size(), 1);
    documents.reserve(items.size());
    for (std::int64_t i = 0; i < items.size(); ++i) {
        documents.push_back({items.tokens[i], items.squares[i], i});
        while (!holds(items, rules, degree[i], i)) degree[i] *= 2;
    }
    std::sort(documents.begin(), documents.end(), [&](const Document& a, const Document& b) {
        if (degree[a.id] != degree[b.id]) return degree[a.id] > degree[b.id];
        return a.length != b.length ? a.length > b.length : a.id < b.id;
    });
    return documents;
}

// ---- Groups of ranks

// Groups of ranks as bins of an assignment.
class Groups {
  public:
    // `mean_tokens`: tokens of a rank in a micro batch if all ranks have the same number.
    Groups(Assignment& assignment, std::int64_t mean_tokens)
        : assignment_(assignment),
          mean_tokens_(mean_tokens),
          next_rank_(assignment.num_micro_batches(), 0) {
        assignment.take({});
    }

    const Items& items() const { return assignment_.items(); }
    const StepRules& rules() const { return assignment_.rules(); }
    std::int64_t mean_tokens() const { return mean_tokens_; }
    std::int64_t num_micro_batches() const { return ssize(next_rank_); }
    std::int64_t size() const { return assignment_.num_bins(); }
    const Bin& operator[](std::int64_t g) const { return assignment_.bins()[g]; }
    std::int64_t squares(std::int64_t g) const { return squares_[g]; }

    std::int64_t free_ranks(std::int64_t micro_batch) const {
        return rules().num_ranks - next_rank_[micro_batch];
    }
    // The first rank of a group is a multiple of its degree.
    bool can_open(std::int64_t micro_batch, std::int64_t degree) const {
        return free_ranks(micro_batch) >= degree && next_rank_[micro_batch] % degree == 0;
    }
    // Opens a group of the next free ranks.
    void open(std::int64_t micro_batch, std::int64_t degree) {
        assignment_.open_bin({micro_batch, next_rank_[micro_batch], degree});
        squares_.push_back(0);
        next_rank_[micro_batch] += degree;
    }

    // Returns the free tokens of a group; 0 if it has the maximum number of documents.
    std::int64_t room(std::int64_t g) const {
        const Bin& group = (*this)[g];
        const bool full = group.documents == rules().max_documents;
        return full ? 0 : group.degree * rules().max_tokens - group.tokens;
    }
    bool has_room(std::int64_t g, const Document& document) const {
        return assignment_.has_room(g, document.id);
    }
    // Returns the tokens that a group lacks to reach `per_rank` per rank; negative if it has more.
    std::int64_t missing(std::int64_t g, std::int64_t per_rank) const {
        return (*this)[g].degree * per_rank - (*this)[g].tokens;
    }

    void place(const Document& document, std::int64_t g) {
        assignment_.put(document.id, g);
        squares_[g] += document.square;
    }

  private:
    Assignment& assignment_;
    std::int64_t mean_tokens_;
    std::vector<std::int64_t> next_rank_;  // per micro batch
    std::vector<std::int64_t> squares_;    // per group
};

// ---- Long documents: equal attention of the ranks of a micro batch

// A micro batch whose ranks should have mean_squares of attention each.
class MicroBatch {
  public:
    MicroBatch(Groups& groups, std::int64_t number, std::int64_t mean_squares,
               std::int64_t least_degree)
        : groups_(groups),
          number_(number),
          mean_squares_(mean_squares),
          least_degree_(least_degree),
          first_group_(groups.size()),
          initial_wish_(mean_squares / groups.mean_tokens()) {}

    // Places a document in the group with the largest `wish` (see update), or opens a group.
    // Returns false if no group has room.
    bool place(const Document& document) {
        const std::int64_t degree = degree_of(document);
        std::int64_t best = kNone, most = std::numeric_limits<std::int64_t>::min();
        for (std::int64_t i = 0; i < ssize(state_); ++i) {
            const State& state = state_[i];
            if (state.wish <= most || document.length > state.room || state.degree < degree ||
                !groups_.has_room(first_group_ + i, document))
                continue;
            best = i;
            most = state.wish;
        }
        if (groups_.can_open(number_, degree) && (best == kNone || most < initial_wish_)) {
            best = ssize(state_);
            open(degree);
        }
        if (best == kNone) return false;
        groups_.place(document, first_group_ + best);
        update(best);
        return true;
    }

    // Returns true if a document of this length may fit.
    bool has_room(std::int64_t length) const {
        const auto fits = [&](const State& state) { return state.room >= length; };
        return groups_.free_ranks(number_) > 0 || std::any_of(state_.begin(), state_.end(), fits);
    }

    void open_free_ranks() {
        std::int64_t degree = least_degree_;
        while (groups_.free_ranks(number_) > 0) {
            while (!groups_.can_open(number_, degree)) degree /= 2;
            open(degree);
        }
    }

  private:
    struct State {
        std::int64_t wish, room, degree;
    };

    // Returns the fewest ranks that hold the document and get at most half of their attention from
    // it, so that other documents can even out the rest. If linear layers cost far more than
    // attention, a small share of their cost counts as attention.
    std::int64_t degree_of(const Document& document) const {
        const StepRules& rules = groups_.rules();
        std::int64_t degree = least_degree_;
        const std::int64_t linear = rules.linear_cost_tokens * groups_.mean_tokens();
        const std::int64_t largest_share = (mean_squares_ + linear / 32) / 2;
        while (!holds(groups_.items(), rules, degree, document.id)) degree *= 2;
        while (degree < rules.max_context_parallel_size && document.square / degree > largest_share)
            degree *= 2;
        return degree;
    }

    void open(std::int64_t degree) {
        groups_.open(number_, degree);
        state_.push_back({0, 0, degree});
        update(ssize(state_) - 1);
    }

    // Recomputes `wish`: documents of this length would give the group the attention and the tokens
    // that it lacks. Keeps some room for short documents, which fill all groups exactly.
    void update(std::int64_t i) {
        const std::int64_t g = first_group_ + i, mean_tokens = groups_.mean_tokens();
        const Bin& group = groups_[g];
        const std::int64_t tokens = groups_.missing(g, mean_tokens);
        const std::int64_t squares = group.degree * mean_squares_ - groups_.squares(g);
        state_[i].wish = squares / std::max<std::int64_t>(tokens, 1);
        state_[i].room = groups_.room(g);
        if (group.documents > 0)
            state_[i].room = std::min(state_[i].room, tokens - mean_tokens / 16);
    }

    Groups& groups_;
    std::int64_t number_, mean_squares_, least_degree_, first_group_, initial_wish_;
    std::vector<State> state_;
};

// Opens groups for the first `count` documents, with at least `least_degree` ranks each while ranks
// are free. Returns the documents that are not placed.
std::vector<Document> assign_long(Groups& groups, const std::vector<Document>& documents,
                                  std::int64_t count, std::int64_t least_degree) {
    std::vector<Document> unplaced(documents.begin(), documents.begin() + count);
    std::int64_t unplaced_tokens = 0, shortest = std::numeric_limits<std::int64_t>::max();
    for (const Document& document : unplaced) {
        unplaced_tokens += document.length;
        shortest = std::min(shortest, document.length);
    }
    for (std::int64_t m = 0; m < groups.num_micro_batches(); ++m) {
        const std::int64_t num_open = groups.num_micro_batches() - m;
        const std::int64_t share = (unplaced_tokens + num_open - 1) / num_open;
        std::int64_t tokens = 0, squares = 0;
        for (std::int64_t i = 0; i < ssize(unplaced) && tokens < share; ++i) {
            tokens += unplaced[i].length;
            squares += unplaced[i].square;
        }
        MicroBatch micro_batch(groups, m, squares / groups.rules().num_ranks, least_degree);
        std::int64_t i = 0, kept = 0;
        for (tokens = 0; i < ssize(unplaced) && tokens < share && micro_batch.has_room(shortest);
             ++i) {
            if (micro_batch.place(unplaced[i]))
                tokens += unplaced[i].length;
            else
                unplaced[kept++] = unplaced[i];
        }
        unplaced.erase(unplaced.begin() + kept, unplaced.begin() + i);
        micro_batch.open_free_ranks();
        unplaced_tokens -= tokens;
    }
    unplaced.insert(unplaced.end(), documents.begin() + count, documents.end());
    return unplaced;
}

// ---- Short documents: equal tokens of all ranks

// Unplaced documents by length; finds a few whose lengths add up to an exact sum.
class Pool {
  public:
    explicit Pool(Span<const Document> documents);  // longest first; kept alive by the caller

    std::int64_t size() const { return size_; }
    bool has_up_to(std::int64_t length) const { return longest_up_to(length) >= 0; }
    Document take_longest(std::int64_t length) { return take(longest_up_to(length)); }

    // Takes one, two or three documents (at most `count`) whose lengths sum to `sum`; else none.
    std::vector<Document> take_sum(std::int64_t sum, std::int64_t count);

    // Takes all documents, longest first.
    std::vector<Document> take_all();

  private:
    // A kind is the rank of a length among the distinct lengths, shortest first.
    std::int64_t longest_up_to(std::int64_t length) const;
    std::int64_t kind_of(std::int64_t length) const;
    bool has(std::int64_t kind) const { return kind >= 0 && count_[kind] > 0; }
    std::pair<std::int64_t, std::int64_t> pair_of_sum(std::int64_t sum) const;
    Document take(std::int64_t kind);

    Span<const Document> documents_;
    std::vector<std::int64_t> length_, end_, count_;  // per kind; end_: in documents_
    std::vector<std::int32_t> kind_;                  // per length from length_[0] on; -1: none
    std::int64_t longest_ = -1, size_ = 0;            // longest kind with documents
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

// Prefers two similar lengths, which keeps short documents for the last groups.
std::pair<std::int64_t, std::int64_t> Pool::pair_of_sum(std::int64_t sum) const {
    for (std::int64_t k = longest_up_to(sum / 2); k >= 0; --k) {
        if (sum - length_[k] > length_[longest_]) break;
        const std::int64_t other = kind_of(sum - length_[k]);
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

std::vector<Document> Pool::take_all() {
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

// Places each document in the group whose ranks lack the most tokens; false if one cannot fit.
bool assign_to_emptiest(Groups& groups, Span<const Document> documents) {
    using Entry = std::pair<std::int64_t, std::int64_t>;  // tokens missing per rank, -group
    const auto entry = [&](std::int64_t g) {
        return Entry{groups.missing(g, groups.mean_tokens()) / groups[g].degree, -g};
    };
    std::vector<Entry> entries;
    for (std::int64_t g = 0; g < groups.size(); ++g) entries.push_back(entry(g));
    std::priority_queue<Entry> emptiest(entries.begin(), entries.end());
    std::vector<Entry> skipped;  // groups without room for the document
    for (const Document& document : documents) {
        while (!emptiest.empty() && !groups.has_room(-emptiest.top().second, document)) {
            skipped.push_back(emptiest.top());
            emptiest.pop();
        }
        if (emptiest.empty()) return false;
        const std::int64_t g = -emptiest.top().second;
        emptiest.pop();
        groups.place(document, g);
        emptiest.push(entry(g));
        for (const Entry& other : skipped) emptiest.push(other);
        skipped.clear();
    }
    return true;
}

// Fills a group to `per_rank` tokens per rank: with the longest documents until three documents can
// complete it exactly or within 16 tokens.
void fill(Groups& groups, std::int64_t g, std::int64_t per_rank, Pool& pool) {
    constexpr std::int64_t kWaste = 16;
    while (pool.size() > 0) {
        const std::int64_t missing = std::min(groups.missing(g, per_rank), groups.room(g));
        const std::int64_t places = groups.rules().max_documents - groups[g].documents;
        for (std::int64_t sum = missing; sum > missing - kWaste; --sum) {
            const auto documents = pool.take_sum(sum, std::min<std::int64_t>(places, 3));
            for (const Document& document : documents) groups.place(document, g);
            if (!documents.empty()) return;
        }
        if (!pool.has_up_to(missing)) return;
        groups.place(pool.take_longest(missing), g);
    }
}

bool assign_short(Groups& groups, const std::vector<Document>& documents) {
    // Exact sums consider only lengths, neither caps nor groups of documents.
    const Items& items = groups.items();
    if (!items.cap.empty() || std::any_of(items.documents.begin(), items.documents.end(),
                                          [](std::int64_t count) { return count > 1; }))
        return assign_to_emptiest(groups, documents);
    const std::int64_t size = ssize(documents), kept = std::min(size, 3 * groups.size() + 1024);
    if (!assign_to_emptiest(groups, {documents.data(), size - kept})) return false;

    // Fill groups that lack the fewest tokens first, because they can be filled in the fewest ways.
    // Free room then remains in the last groups.
    std::vector<std::pair<std::int64_t, std::int64_t>> order;
    for (std::int64_t g = 0; g < groups.size(); ++g)
        order.push_back({groups.missing(g, groups.mean_tokens()) / groups[g].degree, g});
    std::sort(order.begin(), order.end());
    Pool pool({documents.data() + size - kept, kept});
    const std::int64_t mean = groups.mean_tokens();
    const std::int64_t per_rank = std::min(groups.rules().max_tokens, mean + mean / 512);
    for (const auto& [missing, g] : order) fill(groups, g, per_rank, pool);
    return assign_to_emptiest(groups, pool.take_all());
}

// Returns how many documents count as long: the longest ones with `share` tokens in all, and all
// that one rank cannot hold.
std::int64_t num_long(const Groups& groups, const std::vector<Document>& documents,
                      std::int64_t share) {
    std::int64_t count = 0;
    for (std::int64_t tokens = 0; count < ssize(documents); ++count) {
        if (tokens >= share && holds(groups.items(), groups.rules(), 1, documents[count].id)) break;
        tokens += documents[count].length;
    }
    return count;
}

}  // namespace

bool assign_shared(Assignment& assignment) {
    const Items& items = assignment.items();
    const StepRules& rules = assignment.rules();
    const std::vector<Document> documents = longest_first(items, rules);
    std::int64_t tokens = 0;
    for (const Document& document : documents) tokens += document.length;
    const std::int64_t places = assignment.num_micro_batches() * rules.num_ranks;
    // Treat a quarter of the tokens as short; if that does not fill the groups, treat all as short.
    for (const std::int64_t share : {tokens - tokens / 4, std::int64_t{0}}) {
        for (std::int64_t least = 1; least <= rules.max_context_parallel_size; least *= 2) {
            Groups groups(assignment, (tokens + places - 1) / places);
            const std::int64_t count = num_long(groups, documents, share);
            if (!assign_short(groups, assign_long(groups, documents, count, least))) continue;
            std::vector<Bin> bins = assignment.bins();
            for (Bin& bin : bins) std::sort(bin.items.begin(), bin.items.end());
            assignment.take(std::move(bins));
            return true;
        }
    }
    return false;
}

void assign_apart(Assignment& assignment) {
    const Items& items = assignment.items();
    std::vector<Bin> bins;
    for (std::int64_t i = 0; i < items.size(); ++i) {
        std::int64_t degree = 1;
        while (!holds(items, assignment.rules(), degree, i)) degree *= 2;
        bins.push_back({i, 0, degree});
        bins.back().items.push_back(static_cast<std::int32_t>(i));
    }
    assignment.take(std::move(bins));
}

}  // namespace megapack
