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

// What is true of the first sample of a pattern stays true of its repeats: a document that was the
// choice then is there until the last of them, and one that was not there does not come back. Only
// a head changes what there is, so its sample is not repeated.
void BucketPlanner::next(std::int64_t max_repeats) {
    choose_lengths();
    std::int64_t repeats = max_repeats;
    for (const PatternEntry& entry : chosen_)
        repeats = std::min(repeats, counts_[entry.length] / entry.copies);
    const bool with_head = rules_.overflow == Overflow::kHead && slots_ > 0 &&
                           rules_.exceeds_threshold(space_, bucket_) && shortest_left() > 0;
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
    // A length may be named more than once: its documents are counted together.
    for (const PatternEntry& entry : chosen_) {
        const std::int64_t there = entry.length < ssize(counts_) ? counts_[entry.length] : 0;
        check(entry.copies <= there / given.count, "a given pattern needs ", given.count, " times ",
              entry.copies, " documents of length ", entry.length, "; there are ", there);
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

// The smallest bucket that holds the longest document, then again and again the longest document
// that fits in what is left.
void BucketPlanner::choose_lengths() {
    std::int64_t smallest = 0;
    while (rules_.capacities[smallest] < longest()) ++smallest;
    open(smallest);
    do {
        for (std::int64_t length = longest_left(space_); length > 0 && slots_ > 0;
             length = longest_left(std::min(space_, length - 1))) {
            choose(length, std::min({left(length), space_ / length, slots_}));
            if (rules_.pairs && replace_last_by_pair()) return;
        }
    } while (rules_.overflow == Overflow::kPromote && promote());
}

void BucketPlanner::open(std::int64_t bucket) {
    bucket_ = bucket;
    space_ = rules_.capacities[bucket];
    slots_ = rules_.segment_limit(bucket);
}

// Keeps the sample's documents longest first.
void BucketPlanner::choose(std::int64_t length, std::int64_t copies) {
    space_ -= copies * length;
    slots_ -= copies;
    auto at = chosen_.end();
    while (at != chosen_.begin() && (at - 1)->length < length) --at;
    const auto amount = static_cast<std::int32_t>(copies);
    if (at != chosen_.begin() && (at - 1)->length == length) {
        (at - 1)->copies += amount;
    } else {
        chosen_.insert(at, {static_cast<std::int32_t>(length), amount, 0});
    }
}

// BucketLLM, Algorithm 2, lines 6 to 12: if the document chosen last leaves more space than the
// threshold but less than any other document needs, the two documents that together leave the
// least space take its place; of several such pairs, the one with the longest document.
bool BucketPlanner::replace_last_by_pair() {
    if (!rules_.exceeds_threshold(space_, bucket_) || slots_ == 0) return false;
    const std::int64_t shortest = shortest_left();
    const std::int64_t single = chosen_.back().length, space = space_ + single;
    if (shortest <= space_ || 2 * shortest > space) return false;
    std::int64_t best = single, longer = 0;
    for (std::int64_t a = longest_left(space - shortest); 2 * a > best && best < space;
         a = longest_left(a - 1)) {
        std::int64_t b = longest_left(std::min(a, space - a));
        if (b == a && left(a) < 2) b = longest_left(a - 1);
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

// A sample that would be padded by more than the threshold moves to the smallest larger bucket in
// which it has room for another document.
bool BucketPlanner::promote() {
    if (!rules_.exceeds_threshold(space_, bucket_)) return false;
    const std::int64_t shortest = shortest_left();
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

// Documents of a length that the present sample has not chosen.
std::int64_t BucketPlanner::left(std::int64_t length) const {
    std::int64_t count = counts_[length];
    for (const PatternEntry& entry : chosen_)
        if (entry.length == length) count -= entry.copies;
    return count;
}

std::int64_t BucketPlanner::longest_left(std::int64_t limit) const {
    std::int64_t length = present_.at_most(limit);
    while (length > 0 && left(length) == 0) length = present_.at_most(length - 1);
    return length;
}

std::int64_t BucketPlanner::shortest_left() const {
    const std::int64_t end = ssize(counts_);
    std::int64_t length = present_.at_least(1);
    while (length > 0 && left(length) == 0)
        length = length + 1 < end ? present_.at_least(length + 1) : -1;
    return length;
}

// Takes `amount` documents of a class; the number of the first.
std::int64_t BucketPlanner::take(std::int64_t length, std::int64_t amount) {
    if ((counts_[length] -= amount) == 0) present_.erase(length);
    return std::exchange(taken_[length], taken_[length] + amount);
}

// The first `tokens` tokens of the shortest document; its rest stays in the pool.
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
