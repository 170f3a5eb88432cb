#include "core/packing_bucket_plan.hpp"

#include <algorithm>

#include "core/length_set.hpp"

namespace megapack {
namespace {

class Planner {
  public:
    Planner(std::vector<std::int64_t> counts, const BucketRules& rules)
        : rules_(rules),
          counts_(std::move(counts)),
          added_(counts_.size(), 0),
          taken_(counts_.size(), 0),
          present_(rules.capacities.back()) {
        for (std::size_t l = 1; l < counts_.size(); ++l)
            if (counts_[l] > 0) present_.insert(static_cast<std::int64_t>(l));
        plan_.samples_in_bucket.assign(rules.capacities.size(), 0);
        plan_.segments_in_bucket.assign(rules.capacities.size(), 0);
    }

    BucketPlan run() {
        while (!present_.empty()) {
            choose_pattern();
            take_pattern();
        }
        return std::move(plan_);
    }

  private:
    std::int64_t& count(std::int64_t length) { return counts_[static_cast<std::size_t>(length)]; }
    std::int64_t capacity(std::size_t bucket) const { return rules_.capacities[bucket]; }

    // The next sample: lengths_, bucket_ and the space it leaves. Classes are marked as taken from
    // while choosing, so that "what else is there" needs no special case.
    void choose_pattern() {
        chosen_.clear();
        const std::int64_t longest = present_.at_most(rules_.capacities.back());
        bucket_ = bucket_for(longest);
        space_ = capacity(bucket_);
        for (std::int64_t l = longest; l > 0;) {
            const std::int64_t copies = std::min(count(l), space_ / l);
            choose(l, copies);
            space_ -= copies * l;
            l = space_ > 0 ? present_.at_most(std::min(space_, l - 1)) : 0;
        }
    }

    void choose(std::int64_t length, std::int64_t copies) {
        chosen_.push_back(
            {static_cast<std::int32_t>(length), static_cast<std::int32_t>(copies), 0});
    }

    std::size_t bucket_for(std::int64_t longest) {
        std::size_t b = 0;
        while (capacity(b) < longest) ++b;
        if (!rules_.promote) return b;
        const std::int64_t other = shortest_beside(longest);
        if (other < 0) return b;
        for (std::size_t larger = b; larger < rules_.capacities.size(); ++larger) {
            const std::int64_t space = capacity(larger) - longest;
            if (space == 0 || space >= other) return larger;
        }
        return b;
    }

    // The shortest document besides one of class `length`; -1 if there is none.
    std::int64_t shortest_beside(std::int64_t length) {
        const std::int64_t shortest = present_.at_least(1);
        if (shortest != length || count(length) > 1) return shortest;
        return length < rules_.capacities.back() ? present_.at_least(length + 1) : -1;
    }

    void take_pattern() {
        std::int64_t repeats = count(chosen_[0].length) / chosen_[0].copies;
        for (const PatternEntry& entry : chosen_)
            repeats = std::min(repeats, count(entry.length) / entry.copies);
        std::int64_t segments = 0;
        for (PatternEntry entry : chosen_) {
            entry.rank = take(entry.length, repeats * entry.copies);
            plan_.entries.push_back(entry);
            segments += repeats * entry.copies;
        }
        plan_.patterns.push_back({repeats, static_cast<std::uint32_t>(plan_.entries.size()),
                                  static_cast<std::int32_t>(bucket_), -1});
        plan_.samples_in_bucket[bucket_] += repeats;
        plan_.segments_in_bucket[bucket_] += segments;
    }

    // Takes `amount` documents of a class; the rank of the first.
    std::int64_t take(std::int64_t length, std::int64_t amount) {
        const std::int64_t rank = taken_[static_cast<std::size_t>(length)];
        taken_[static_cast<std::size_t>(length)] += amount;
        if ((count(length) -= amount) == 0) present_.erase(length);
        return rank;
    }

    const BucketRules& rules_;
    std::vector<std::int64_t> counts_;  // documents left, by length
    std::vector<std::int64_t> added_, taken_;
    LengthSet present_;  // lengths with documents left
    BucketPlan plan_;

    std::vector<PatternEntry> chosen_;
    std::size_t bucket_ = 0;
    std::int64_t space_ = 0;
};

}  // namespace

BucketPlan plan_buckets(std::vector<std::int64_t> counts, const BucketRules& rules) {
    return Planner(std::move(counts), rules).run();
}

}  // namespace megapack
