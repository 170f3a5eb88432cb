// Items (documents, or groups of documents that stay together) in bins. A bin is the content of a
// rank, or of ranks that share it, in one micro batch.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/span.hpp"
#include "core/planning/step_plan.hpp"

namespace megapack {

// Items to assign. A group of documents that exceeds a bin consists of several items, a family,
// which one rank holds.
struct Items {
    std::int64_t kinds = 1;
    std::vector<std::int64_t> tokens, squares, documents, family;  // per item; family: -1, none
    // cost[i * kinds + k]: cost of item i and kind k, in units such that no path is below `unit`.
    std::vector<std::int64_t> cost;
    std::int64_t unit = 0;
    // If costs are capped: the cost in other units, rounded up, and the cap of a rank per kind.
    std::vector<std::int64_t> amount, cap;

    std::int64_t size() const { return ssize(tokens); }
    std::int64_t largest_cost(std::int64_t item) const;
};

// Returns true if `degree` ranks can hold an item.
bool holds(const Items& items, const StepRules& rules, std::int64_t degree, std::int64_t item);

struct Bin {
    std::int64_t micro_batch, first_rank, degree;
    std::int64_t tokens = 0, documents = 0;
    bool pinned = false;  // to its rank, because it contains an item of a family
    std::vector<std::int32_t> items{};
};

class Assignment {
  public:
    Assignment(const Items& items, const StepRules& rules, std::int64_t num_micro_batches)
        : items_(items), rules_(rules), num_micro_batches_(num_micro_batches) {}

    // Opens a bin per rank and micro batch; puts items, the most expensive (by_tokens: longest)
    // first, into the bin with the least work (fewest tokens) that has room. Returns false if no
    // bin has room for an item.
    bool assign_greedily(bool by_tokens);

    // Opens the same bins; puts items, longest first, into the fullest bin with room. Returns false
    // if no bin has room for an item.
    bool assign_best_fit();

    // Replaces all bins.
    void take(std::vector<Bin> bins);

    // True if no ranks share a bin, in any micro batch.
    bool of_single_ranks() const { return num_bins() == num_micro_batches_ * rules_.num_ranks; }

    // Makes micro batches of bins with similar work; in each, the bin with the most work goes to
    // the rank with the least work so far. Only for bins of one rank each.
    void arrange();

    // Restores an earlier state.
    void restore(const Assignment& before) {
        bins_ = before.bins_;
        cost_ = before.cost_;
        amount_ = before.amount_;
    }

    // Removes and returns all items of a bin that belong to no family.
    std::vector<std::int32_t> empty(std::int64_t bin);
    void open_bin(Bin bin);  // without items
    void put(std::int64_t item, std::int64_t bin);
    void remove(std::int64_t place, std::int64_t bin);
    // Exchanges the item at a place of one bin with the item at a place of another.
    void swap(std::int64_t place, std::int64_t bin, std::int64_t other_place, std::int64_t other);
    void swap_ranks(std::int64_t bin, std::int64_t other);

    // Moves one item into each empty bin, from a bin that has several.
    void fill_empty_bins();

    // True if a bin has an item that belongs to no family.
    bool has_movable_item(std::int64_t bin) const;
    std::int64_t free_tokens(std::int64_t bin) const {
        return bins_[bin].degree * rules_.max_tokens - bins_[bin].tokens;
    }
    bool has_room(std::int64_t bin, std::int64_t item) const {
        return items_.tokens[item] <= free_tokens(bin) && fits(bin, item, -1);
    }
    // True if a bin can hold `item` (none: -1) after `other` (none: -1) leaves it.
    bool fits(std::int64_t bin, std::int64_t item, std::int64_t other) const;

    const Items& items() const { return items_; }
    const StepRules& rules() const { return rules_; }
    std::int64_t num_micro_batches() const { return num_micro_batches_; }
    std::int64_t num_bins() const { return ssize(bins_); }
    const std::vector<Bin>& bins() const { return bins_; }
    // Cost of all ranks of a bin, by kind.
    const std::int64_t* cost(std::int64_t bin) const { return &cost_[bin * items_.kinds]; }
    // Largest cost of a bin, per rank.
    std::int64_t work(std::int64_t bin) const;

  private:
    void open_bins();
    void hold(std::vector<Bin> bins);
    bool place_families();
    void count(std::int64_t item, std::int64_t bin, std::int64_t sign);
    std::vector<std::int64_t> by_falling_work() const;

    const Items& items_;
    const StepRules& rules_;
    std::int64_t num_micro_batches_;
    std::vector<Bin> bins_;
    std::vector<std::int64_t> cost_, amount_;  // [b * kinds + k], of all ranks of bin b
};

// ---- Documents that several ranks share (sharing.cpp)

// Assigns items, longest first, to groups of ranks: long ones so that ranks have equal attention,
// short ones so that ranks have equal tokens. Finds sums of lengths that fit exactly, so it also
// succeeds if ranks are nearly full. Returns false if no group has room for an item.
bool assign_shared(Assignment& assignment);

// Assigns every item to a separate micro batch and to the ranks that it needs.
void assign_apart(Assignment& assignment);

// ---- Equal work (balance.cpp)

// Minimizes the waiting of ranks by exchanging items; evaluates at most `budget` exchanges. Every
// kind of cost has a path (see Balance); the longest one counts. Then minimizes the busiest rank of
// the step without making a path longer. Returns a number that is smaller for a better assignment.
std::int64_t balance(Assignment& assignment, std::int64_t budget);

}  // namespace megapack
