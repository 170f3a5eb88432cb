#include "core/packing/bucket_plan.hpp"

#include <algorithm>
#include <limits>
#include <utility>

namespace megapack {

BucketPlanner::BucketPlanner(std::vector<std::int64_t> counts, const BucketRules& rules)
    : rules_(rules),
      counts_(std::move(counts)),
      present_(std::max<std::int64_t>(ssize(counts_) - 1, 0)) {
    taken_.assign(counts_.size(), 0);
    for (std::int64_t l = 1; l < ssize(counts_); ++l)
        if (counts_[l] > 0) present_.insert(l);
    plan.samples_in_bucket.assign(rules.capacities.size(), 0);
    plan.segments_in_bucket.assign(rules.capacities.size(), 0);
}

void BucketPlanner::add(std::int64_t length) {
    if (counts_[length]++ == 0) present_.insert(length);
}

// Every repeat of a pattern makes the same choices as its first sample: the chosen lengths remain
// available until the last repeat, and no other length appears. Only a head adds a length, so a
// sample with a head is not repeated.
void BucketPlanner::next(std::int64_t max_repeats) {
    choose_lengths();
    std::int64_t repeats = max_repeats;
    for (const PatternEntry& entry : chosen_)
        repeats = std::min(repeats, counts_[entry.length] / entry.copies);
    const bool with_head = rules_.overflow == Overflow::kHead && slots_ > 0 &&
                           rules_.exceeds_threshold(space_, bucket_) && shortest_unchosen() > 0;
    take_chosen(with_head ? 1 : repeats, with_head);
}

void BucketPlanner::apply(const GivenPattern& given) {
    const auto num_buckets = static_cast<std::int32_t>(rules_.capacities.size());
    check(given.bucket >= 0 && given.bucket < num_buckets && given.count > 0 &&
              !given.lengths.empty(),
          "a given pattern has bucket ", given.bucket, " of ", num_buckets, " and count ",
          given.count);
    open(given.bucket);
    for (const auto& [length, copies] : given.lengths) {
        check(length > 0 && copies > 0 && copies <= space_ / length && copies <= slots_,
              "a given pattern has ", copies, " documents of length ", length,
              " where its bucket has room for ", space_, " tokens and ", slots_, " segments");
        choose(length, copies);
    }
    // A pattern may contain a length more than once: `chosen_` has the sum.
    for (const PatternEntry& entry : chosen_) {
        const std::int64_t count = entry.length < ssize(counts_) ? counts_[entry.length] : 0;
        check(entry.copies <= count / given.count, "a given pattern needs ", given.count, " times ",
              entry.copies, " documents of length ", entry.length, "; there are ", count);
    }
    take_chosen(given.count, false);
}

void BucketPlanner::take_chosen(std::int64_t repeats, bool with_head) {
    std::int64_t segments = with_head ? 1 : 0;
    for (PatternEntry entry : chosen_) {
        entry.rank = take(entry.length, repeats * entry.copies);
        plan.entries.push_back(entry);
        segments += repeats * entry.copies;
    }
    chosen_.clear();
    plan.patterns.push_back({repeats, static_cast<std::uint32_t>(plan.entries.size()),
                             static_cast<std::int32_t>(bucket_),
                             with_head ? take_head(space_) : -1});
    plan.samples_in_bucket[bucket_] += repeats;
    plan.segments_in_bucket[bucket_] += segments;
}

// Opens the smallest bucket that holds the longest document, then repeatedly chooses the longest
// document that fits into the free space.
void BucketPlanner::choose_lengths() {
    std::int64_t smallest = 0;
    while (rules_.capacities[smallest] < longest()) ++smallest;
    open(smallest);
    do {
        if (rules_.lookahead) look_ahead();
        for (std::int64_t length = longest_unchosen(space_); length > 0 && slots_ > 0;
             length = longest_unchosen(std::min(space_, length - 1))) {
            choose(length, std::min({unchosen(length), space_ / length, slots_}));
            if (rules_.pairs && replace_last_by_pair()) return;
        }
    } while (rules_.overflow == Overflow::kPromote && promote());
}

// Chooses, while there is one, the longest document that leaves no space or at least as much as the
// shortest document needs. Space that no document fits is padding: if short documents are rare,
// the longest document that fits often leaves such space.
void BucketPlanner::look_ahead() {
    const std::int64_t shortest = present_.at_least(1);  // also if it is in the open sample
    if (chosen_.empty()) choose(longest(), 1);           // it decided the bucket
    while (slots_ > 0) {
        const std::int64_t fits = longest_unchosen(space_);
        const std::int64_t needed = slots_ > 1 && fits < space_ ? shortest : 0;
        const std::int64_t length = std::min(fits, longest_unchosen(space_ - needed));
        if (length < 0) return;
        // Further copies are chosen next only if no longer document may fill the space exactly.
        std::int64_t copies = 1;
        if (length == fits) copies = (space_ % length == 0 ? space_ : space_ - needed) / length;
        choose(length, std::min({unchosen(length), copies, slots_}));
    }
}

void BucketPlanner::open(std::int64_t bucket) {
    bucket_ = bucket;
    space_ = rules_.capacities[bucket];
    slots_ = rules_.segment_limit(bucket);
}

// Adds documents to the open sample; keeps it ordered, longest first.
void BucketPlanner::choose(std::int64_t length, std::int64_t copies) {
    space_ -= copies * length;
    slots_ -= copies;
    auto at = chosen_.end();
    while (at != chosen_.begin() && (at - 1)->length < length) --at;
    const auto amount = static_cast<std::int32_t>(copies);
    if (at != chosen_.begin() && (at - 1)->length == length)
        (at - 1)->copies += amount;
    else
        chosen_.insert(at, {static_cast<std::int32_t>(length), amount, 0});
}

// BucketLLM, Algorithm 2, lines 6 to 12: if the document chosen last leaves more space than the
// threshold but less than any other document needs, replaces it by the two documents that together
// leave the least space; of several such pairs, by the one with the longest document.
bool BucketPlanner::replace_last_by_pair() {
    if (!rules_.exceeds_threshold(space_, bucket_) || slots_ == 0) return false;
    const std::int64_t shortest = shortest_unchosen();
    const std::int64_t single = chosen_.back().length, space = space_ + single;
    if (shortest <= space_ || 2 * shortest > space) return false;
    std::int64_t best = single, longer = 0;
    for (std::int64_t a = longest_unchosen(space - shortest); 2 * a > best && best < space;
         a = longest_unchosen(a - 1)) {
        std::int64_t b = longest_unchosen(std::min(a, space - a));
        if (b == a && unchosen(a) < 2) b = longest_unchosen(a - 1);
        if (b > 0 && a + b > best) {
            best = a + b;
            longer = a;
        }
    }
    if (best == single) return false;
    space_ = space;
    ++slots_;
    if (--chosen_.back().copies == 0) chosen_.pop_back();
    if (2 * longer == best) {
        choose(longer, 2);
    } else {
        choose(longer, 1);
        choose(best - longer, 1);
    }
    return true;
}

// Moves a sample with more padding than the threshold to the smallest larger bucket that has room
// for another document.
bool BucketPlanner::promote() {
    if (!rules_.exceeds_threshold(space_, bucket_)) return false;
    const std::int64_t shortest = shortest_unchosen();
    if (shortest < 0) return false;
    const std::int64_t used = rules_.capacities[bucket_] - space_;
    const std::int64_t segments = rules_.segment_limit(bucket_) - slots_;
    for (std::int64_t b = bucket_ + 1; b < ssize(rules_.capacities); ++b) {
        if (used + shortest > rules_.capacities[b] || segments >= rules_.segment_limit(b)) continue;
        open(b);
        space_ -= used;
        slots_ -= segments;
        return true;
    }
    return false;
}

// Returns the documents of a length that are neither taken nor in the open sample.
std::int64_t BucketPlanner::unchosen(std::int64_t length) const {
    std::int64_t count = counts_[length];
    for (const PatternEntry& entry : chosen_)
        if (entry.length == length) count -= entry.copies;
    return count;
}

std::int64_t BucketPlanner::longest_unchosen(std::int64_t limit) const {
    std::int64_t length = present_.at_most(limit);
    while (length > 0 && unchosen(length) == 0) length = present_.at_most(length - 1);
    return length;
}

std::int64_t BucketPlanner::shortest_unchosen() const {
    const std::int64_t end = ssize(counts_);
    std::int64_t length = present_.at_least(1);
    while (length > 0 && unchosen(length) == 0)
        length = length + 1 < end ? present_.at_least(length + 1) : -1;
    return length;
}

// Takes `amount` documents of a length; returns the rank of the first among those of its length.
std::int64_t BucketPlanner::take(std::int64_t length, std::int64_t amount) {
    if ((counts_[length] -= amount) == 0) present_.erase(length);
    return std::exchange(taken_[length], taken_[length] + amount);
}

// Takes the first `tokens` tokens of the shortest document; the rest of it stays in the pool.
std::int32_t BucketPlanner::take_head(std::int64_t tokens) {
    const std::int64_t length = present_.at_least(1), rest = length - tokens;
    Head head{static_cast<std::int32_t>(length), static_cast<std::int32_t>(tokens), take(length, 1),
              0};
    add(rest);
    head.rest_rank = taken_[rest] + counts_[rest] - 1;
    plan.heads.push_back(head);
    return static_cast<std::int32_t>(plan.heads.size()) - 1;
}

BucketPlan plan_buckets(std::vector<std::int64_t> counts, const BucketRules& rules) {
    BucketPlanner planner(std::move(counts), rules);
    for (const GivenPattern& pattern : rules.given) planner.apply(pattern);
    while (!planner.empty()) planner.next(std::numeric_limits<std::int64_t>::max());
    return std::move(planner.plan);
}

std::vector<std::int64_t> count_bucket_samples(std::vector<std::int64_t> counts,
                                               const BucketRules& rules) {
    rules.check_rules();
    const auto largest = rules.capacities.back();
    check(ssize(counts) <= largest + 1, "counts has ", counts.size(),
          " lengths from 0 on; the largest bucket holds ", largest);
    Wide tokens = 0;
    for (std::int64_t l = 0; l < ssize(counts); ++l) {
        check(counts[l] >= 0, "counts has ", counts[l], " documents of length ", l);
        tokens += Wide{counts[l]} * l;
    }
    check(tokens <= kMaxTokens, "counts has more than 2^62 tokens in all");
    return plan_buckets(std::move(counts), rules).samples_in_bucket;
}

}  // namespace megapack
