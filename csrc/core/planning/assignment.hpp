// Items (documents, or groups of them that stay together) dealt to bins, a bin being what some
// ranks hold in one micro batch.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/span.hpp"
#include "core/planning/step_plan.hpp"

namespace megapack {

// What is dealt. An item too large for one bin comes in chunks of one family, which one rank holds.
struct Items {
    std::int64_t kinds = 1;
    std::vector<std::int64_t> tokens, squares, documents, family;  // per item; family -1: none
    // Of item i and kind k: [i * kinds + k]. In units in which no path is below `unit`.
    std::vector<std::int64_t> cost;
    std::int64_t unit = 0;
    // Where costs are capped: the same in other units, rounded up; and the cap of a rank.
    std::vector<std::int64_t> amount, cap;

    std::int64_t size() const { return ssize(tokens); }
    std::int64_t dearest(std::int64_t item) const;  // the largest of its costs
};

// Whether so many ranks hold an item.
bool holds(const Items& items, const StepRules& rules, std::int64_t degree, std::int64_t item);

struct Bin {
    std::int64_t micro_batch, first_rank, degree;
    std::int64_t tokens = 0, documents = 0;
    bool pinned = false;  // to its rank, by a family
    std::vector<std::int32_t> items{};
};

class Assignment {
  public:
    Assignment(const Items& items, const StepRules& rules, std::int64_t num_micro_batches)
        : items_(items), rules_(rules), num_micro_batches_(num_micro_batches) {}

    // A bin for every rank and micro batch. The dearest item first (longest, by_tokens) into the
    // bin that has least work with it (fewest tokens) and room. False where one has room nowhere.
    bool assign_dearest_first(bool by_tokens);

    // The longest item first into the fullest bin with room. False where one has room nowhere.
    bool assign_best_fit();

    // As somebody else dealt them.
    void take(std::vector<Bin> bins);

    // Whether ranks share no bin, and all ranks of all micro batches have one.
    bool of_single_ranks() const { return num_bins() == num_micro_batches_ * rules_.num_ranks; }

    // Bins of like work become one micro batch, in which the dearest goes to the rank with least
    // work so far. For bins of one rank each.
    void arrange();

    // As it was; of the same items.
    void take_back(const Assignment& before) {
        bins_ = before.bins_;
        cost_ = before.cost_;
        amount_ = before.amount_;
    }

    // Takes all items out of a bin but those that one rank must hold, and says which.
    std::vector<std::int32_t> empty(std::int64_t bin);
    void put(std::int64_t item, std::int64_t bin);
    void remove(std::int64_t place, std::int64_t bin);
    // The item at a place of one bin for the item at a place of another.
    void swap(std::int64_t place, std::int64_t bin, std::int64_t other_place, std::int64_t other);
    void swap_ranks(std::int64_t bin, std::int64_t other);

    // A bin without items gets one of a bin that has several.
    void fill_empty_bins();

    // Whether a bin has an item that is of no family.
    bool is_loose(std::int64_t bin) const;
    bool has_room(std::int64_t bin, std::int64_t item) const { return fits(bin, item, -1); }
    // Whether a bin holds `item` (none: -1) without `other` (none: -1).
    bool fits(std::int64_t bin, std::int64_t item, std::int64_t other) const;

    const Items& items() const { return items_; }
    const StepRules& rules() const { return rules_; }
    std::int64_t num_micro_batches() const { return num_micro_batches_; }
    std::int64_t num_bins() const { return ssize(bins_); }
    const std::vector<Bin>& bins() const { return bins_; }
    // Of all ranks of a bin, by kind.
    const std::int64_t* cost(std::int64_t bin) const { return &cost_[bin * items_.kinds]; }
    // The largest of a bin's costs, of one of its ranks.
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
    std::vector<std::int64_t> cost_, amount_;  // of bin b and kind k, of all its ranks
};

// ---- With ranks that share (sharing.cpp)

// Deals items, longest first, to groups of ranks opened in all micro batches: long ones so that
// ranks have equal attention, short ones so that ranks have equal tokens. Also where ranks are
// nearly full: by sums of lengths that fit exactly. False where one has room nowhere.
bool assign_shared(Assignment& assignment);

// Every item in a micro batch of its own, on as many ranks as hold it.
void assign_apart(Assignment& assignment);

// ---- Until ranks have equal work (balance.cpp)

// Makes small, by exchanging items as long as that pays, at most so many exchanges being looked at,
// what ranks wait for each other: of every kind of cost its path (`Balance`), and of the paths the
// longest. Then, the paths being as they are, the busiest rank of the step. Returns a number that
// is smaller for a better arrangement of the same items.
std::int64_t balance(Assignment& assignment, std::int64_t looks);

}  // namespace megapack
