// Documents that several ranks share. Groups of ranks are opened for long documents, so that ranks
// have equal attention (MicroBatch), then filled with short ones to equal tokens (Pool).
#include <algorithm>
#include <limits>
#include <numeric>
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
    const auto before = [&](const Document& a, const Document& b) {
        if (degree[a.id] != degree[b.id]) return degree[a.id] > degree[b.id];
        return a.length != b.length ? a.length > b.length : a.id < b.id;
    };
    // Documents of one rank are already sorted.
    if (!std::is_sorted(documents.begin(), documents.end(), before))
        std::sort(documents.begin(), documents.end(), before);
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
          next_rank_(assignment.num_micro_batches(), 0),
          single_(std::all_of(items().documents.begin(), items().documents.end(),
                              [](std::int64_t count) { return count == 1; })) {
        assignment.take({});
    }

    const Items& items() const { return assignment_.items(); }
    const StepRules& rules() const { return assignment_.rules(); }
    std::int64_t mean_tokens() const { return mean_tokens_; }
    std::int64_t num_micro_batches() const { return ssize(next_rank_); }
    std::int64_t size() const { return assignment_.num_bins(); }
    // True if only its length decides where an item fits: no cap, and no item of several documents.
    bool by_length() const { return single_ && items().cap.empty(); }
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
        return full ? 0 : assignment_.free_tokens(g);
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
    bool single_;                          // every item is one document
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
        for (; !waiting_.empty() && waiting_.top().first >= document.length; waiting_.pop())
            ready_.push({wish_[waiting_.top().second], -waiting_.top().second});
        skipped_.clear();
        for (; !ready_.empty() && !fits(document, degree, -ready_.top().second); ready_.pop())
            skipped_.push_back(ready_.top());
        std::int64_t best = ready_.empty() ? kNone : -ready_.top().second;
        if (groups_.can_open(number_, degree) && (best == kNone || wish_[best] < initial_wish_))
            best = open(degree);
        else if (best != kNone)
            ready_.pop();
        for (const Entry& entry : skipped_) ready_.push(entry);
        if (best == kNone) return false;
        groups_.place(document, first_group_ + best);
        update(best);
        if (room_[best] < document.length)
            waiting_.push({room_[best], best});
        else
            ready_.push({wish_[best], -best});
        return true;
    }

    // Returns true if `place` may succeed. If groups.by_length(), it may then also succeed
    // for all documents that follow in the order of longest_first.
    bool may_place(const Document& document) const {
        return may_fit(document.length) || groups_.can_open(number_, degree_of(document));
    }

    // Returns true if a document of this length may fit.
    bool has_room(std::int64_t length) const {
        return groups_.free_ranks(number_) > 0 || may_fit(length);
    }

    void open_free_ranks() {
        std::int64_t degree = least_degree_;
        while (groups_.free_ranks(number_) > 0) {
            while (!groups_.can_open(number_, degree)) degree /= 2;
            groups_.open(number_, degree);
        }
    }

  private:
    using Entry = std::pair<std::int64_t, std::int64_t>;

    bool fits(const Document& document, std::int64_t degree, std::int64_t i) const {
        const std::int64_t g = first_group_ + i;
        return document.length <= room_[i] && groups_[g].degree >= degree &&
               groups_.has_room(g, document);
    }

    bool may_fit(std::int64_t length) const {
        return !ready_.empty() || (!waiting_.empty() && waiting_.top().first >= length);
    }

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

    std::int64_t open(std::int64_t degree) {
        groups_.open(number_, degree);
        wish_.push_back(0);
        room_.push_back(0);
        return ssize(wish_) - 1;
    }

    // Recomputes `wish`: documents of this length would give the group the attention and the tokens
    // that it lacks. Keeps some room for short documents, which fill all groups exactly.
    void update(std::int64_t i) {
        const std::int64_t g = first_group_ + i, mean_tokens = groups_.mean_tokens();
        const Bin& group = groups_[g];
        const std::int64_t tokens = groups_.missing(g, mean_tokens);
        const std::int64_t squares = group.degree * mean_squares_ - groups_.squares(g);
        wish_[i] = squares / std::max<std::int64_t>(tokens, 1);
        room_[i] = std::min(groups_.room(g), tokens - mean_tokens / 16);
    }

    Groups& groups_;
    std::int64_t number_, mean_squares_, least_degree_, first_group_, initial_wish_;
    std::vector<std::int64_t> wish_, room_;  // per group of this micro batch
    // Groups with room for the latest document: wish, -group. Other groups: room, group.
    std::priority_queue<Entry> ready_, waiting_;
    std::vector<Entry> skipped_;
};

// Numbers 0 to size - 1 of which some were removed.
class Remaining {
  public:
    explicit Remaining(std::int64_t size) : next_(size + 1) {
        std::iota(next_.begin(), next_.end(), 0);
    }

    // Returns the smallest remaining number from i on, or the size. Compresses the path for later
    // calls.
    std::int64_t from(std::int64_t i) {
        while (next_[i] != i) i = next_[i] = next_[next_[i]];
        return i;
    }
    void remove(std::int64_t i) { next_[i] = i + 1; }

  private:
    std::vector<std::int64_t> next_;  // i if it remains, else a larger number
};

// Opens groups for the first `count` documents, with at least `least_degree` ranks each while ranks
// are free. Returns the documents that are not placed.
std::vector<Document> assign_long(Groups& groups, const std::vector<Document>& documents,
                                  std::int64_t count, std::int64_t least_degree) {
    std::int64_t unplaced_tokens = 0, shortest = std::numeric_limits<std::int64_t>::max();
    for (std::int64_t i = 0; i < count; ++i) {
        unplaced_tokens += documents[i].length;
        shortest = std::min(shortest, documents[i].length);
    }
    const auto end = documents.begin() + count;
    Remaining unplaced(count);
    for (std::int64_t m = 0; m < groups.num_micro_batches(); ++m) {
        const std::int64_t num_open = groups.num_micro_batches() - m;
        const std::int64_t share = (unplaced_tokens + num_open - 1) / num_open;
        std::int64_t tokens = 0, squares = 0, i = unplaced.from(0);
        for (; i < count && tokens < share; i = unplaced.from(i + 1)) {
            tokens += documents[i].length;
            squares += documents[i].square;
        }
        MicroBatch micro_batch(groups, m, squares / groups.rules().num_ranks, least_degree);
        tokens = 0;
        for (i = unplaced.from(0); i < count; i = unplaced.from(i + 1)) {
            // Skip the documents that are too long for all groups and all free ranks.
            const auto too_long = [&](const Document& d) { return !micro_batch.may_place(d); };
            if (groups.by_length() && too_long(documents[i])) {
                i = unplaced.from(std::partition_point(documents.begin() + i, end, too_long) -
                                  documents.begin());
            }
            if (i == count || tokens >= share || !micro_batch.has_room(shortest)) break;
            if (!micro_batch.place(documents[i])) continue;
            tokens += documents[i].length;
            unplaced.remove(i);
        }
        micro_batch.open_free_ranks();
        unplaced_tokens -= tokens;
    }
    std::vector<Document> rest;
    for (std::int64_t i = unplaced.from(0); i < count; i = unplaced.from(i + 1))
        rest.push_back(documents[i]);
    rest.insert(rest.end(), end, documents.end());
    return rest;
}

// ---- Short documents: equal tokens of all ranks

// Unplaced documents by length; finds a few whose lengths add up to an exact sum.
class Pool {
  public:
    explicit Pool(Span<const Document> documents);  // longest first; kept alive by the caller

    std::int64_t size() const { return size_; }
    // Returns the longest length of a document up to `length`, or -1.
    std::int64_t longest_up_to(std::int64_t length) const;
    // Takes the first document of a length that the pool has.
    Document take(std::int64_t length);

    // Takes one, two or three documents (at most `count`) whose lengths sum to `sum`; else none.
    std::vector<Document> take_sum(std::int64_t sum, std::int64_t count);

    // Takes all documents, longest first.
    std::vector<Document> take_all();

  private:
    using Words = std::vector<std::uint64_t>;

    // Set of lengths as bits: bit i of the set is bit i % 64 of word i / 64 + 1. Word 0 is empty,
    // so that a read of 64 bits may begin before bit 0.
    static void flip(Words& words, std::int64_t i) {
        words[i / 64 + 1] ^= std::uint64_t{1} << i % 64;
    }
    // Returns the 64 bits up to bit i, which is the highest one.
    static std::uint64_t up_to(const Words& words, std::int64_t i) {
        const std::int64_t word = (i + 1) / 64, shift = (i + 1) % 64;
        return shift == 0 ? words[word] : words[word] >> shift | words[word + 1] << (64 - shift);
    }

    static std::int64_t leading_zeros(std::uint64_t x) { return __builtin_clzll(x); }

    bool has(std::int64_t length) const {
        return shortest_ <= length && length <= longest_ && count_[length - shortest_] > 0;
    }
    // Removes (-1) or adds (1) a document of a length.
    void count(std::int64_t length, std::int64_t sign);
    std::pair<std::int64_t, std::int64_t> pair_of_sum(std::int64_t sum) const;

    Span<const Document> documents_;
    std::int64_t size_, shortest_ = 0, most_ = 0;  // shortest and longest length of `documents`
    std::int64_t longest_ = -1;                    // longest length that is left
    std::vector<std::int32_t> end_, count_;  // per length from shortest_ on; end_: in documents_
    Words lengths_, mirrored_;  // bit length - shortest_, and bit most_ - length: any left
};

Pool::Pool(Span<const Document> documents) : documents_(documents), size_(documents.size()) {
    if (size_ == 0) return;
    shortest_ = documents[size_ - 1].length;
    longest_ = most_ = documents[0].length;
    const std::int64_t range = most_ - shortest_ + 1;
    end_.resize(range);
    count_.resize(range);
    lengths_.resize(range / 64 + 3);
    mirrored_.resize(range / 64 + 3);
    for (std::int64_t i = 0; i < size_; ++i) {
        end_[documents[i].length - shortest_] = static_cast<std::int32_t>(i + 1);
        count(documents[i].length, 1);
    }
}

void Pool::count(std::int64_t length, std::int64_t sign) {
    std::int32_t& count = count_[length - shortest_];
    count += static_cast<std::int32_t>(sign);
    if (count != (sign > 0 ? 1 : 0)) return;
    flip(lengths_, length - shortest_);
    flip(mirrored_, most_ - length);
}

std::int64_t Pool::longest_up_to(std::int64_t length) const {
    for (std::int64_t i = std::min(length, longest_) - shortest_; i >= 0; i -= 64)
        if (const std::uint64_t bits = up_to(lengths_, i); bits != 0)
            return shortest_ + i - leading_zeros(bits);
    return -1;
}

// Prefers two similar lengths, which keeps short documents for the last groups.
std::pair<std::int64_t, std::int64_t> Pool::pair_of_sum(std::int64_t sum) const {
    if (sum % 2 == 0 && has(sum / 2) && count_[sum / 2 - shortest_] > 1) return {sum / 2, sum / 2};
    // Bits of the shorter length and of its complement run in the same direction.
    const std::int64_t least = std::max(shortest_, sum - longest_);
    for (std::int64_t length = (sum - 1) / 2; length >= least; length -= 64) {
        const std::uint64_t bits =
            up_to(lengths_, length - shortest_) & up_to(mirrored_, most_ - sum + length);
        if (bits == 0) continue;
        const std::int64_t shorter = length - leading_zeros(bits);
        return {shorter, sum - shorter};
    }
    return {-1, -1};
}

std::vector<Document> Pool::take_sum(std::int64_t sum, std::int64_t count) {
    constexpr int kTries = 8;
    if (size_ == 0 || sum > count * longest_) return {};
    if (has(sum)) return {take(sum)};
    if (count < 2) return {};
    if (const auto [a, b] = pair_of_sum(sum); a >= 0) return {take(a), take(b)};
    if (count < 3) return {};
    std::int64_t first = longest_up_to(sum - 2 * shortest_);
    for (int i = 0; i < kTries && first >= 0; ++i) {
        this->count(first, -1);
        const auto [a, b] = pair_of_sum(sum - first);
        this->count(first, 1);
        if (a >= 0) return {take(first), take(a), take(b)};
        first = longest_up_to(first - 1);
    }
    return {};
}

std::vector<Document> Pool::take_all() {
    std::vector<Document> documents;
    while (size_ > 0) documents.push_back(take(longest_));
    return documents;
}

Document Pool::take(std::int64_t length) {
    const std::int64_t i = length - shortest_;
    const Document document = documents_[end_[i] - count_[i]];
    --size_;
    count(length, -1);
    if (length == longest_) longest_ = longest_up_to(length);
    return document;
}

// Replaces the largest element of a heap by a smaller one: half the work of a pop and a push.
template <typename T>
void lower_top(std::vector<T>& heap, const T& value) {
    std::int64_t at = 0;
    for (std::int64_t child = 1; child < ssize(heap); child = 2 * at + 1) {
        if (child + 1 < ssize(heap) && heap[child] < heap[child + 1]) ++child;
        if (!(value < heap[child])) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = value;
}

// Places each document in the group whose ranks lack the most tokens; false if one cannot fit.
bool assign_to_emptiest(Groups& groups, Span<const Document> documents) {
    using Entry = std::pair<std::int64_t, std::int64_t>;  // tokens missing per rank, -group
    const auto entry = [&](std::int64_t g) {
        return Entry{groups.missing(g, groups.mean_tokens()) / groups[g].degree, -g};
    };
    std::vector<Entry> emptiest;  // a heap
    for (std::int64_t g = 0; g < groups.size(); ++g) emptiest.push_back(entry(g));
    std::make_heap(emptiest.begin(), emptiest.end());
    std::vector<Entry> skipped;  // groups without room for the document
    for (const Document& document : documents) {
        while (!emptiest.empty() && !groups.has_room(-emptiest[0].second, document)) {
            skipped.push_back(emptiest[0]);
            std::pop_heap(emptiest.begin(), emptiest.end());
            emptiest.pop_back();
        }
        if (emptiest.empty()) return false;
        const std::int64_t g = -emptiest[0].second;
        groups.place(document, g);
        lower_top(emptiest, entry(g));
        for (const Entry& other : skipped) {
            emptiest.push_back(other);
            std::push_heap(emptiest.begin(), emptiest.end());
        }
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
        const std::int64_t longest = pool.longest_up_to(missing);
        if (longest < 0) return;
        groups.place(pool.take(longest), g);
    }
}

bool assign_short(Groups& groups, const std::vector<Document>& documents) {
    // Exact sums consider only lengths.
    if (!groups.by_length()) return assign_to_emptiest(groups, documents);
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
