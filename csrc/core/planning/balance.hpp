// Items (documents, or groups of them that stay together) dealt to bins, a bin being what some
// ranks hold in one micro batch: first all of them, then exchanged for equal work.
#pragma once

#include <cstdint>
#include <vector>

#include "core/planning/step_plan.hpp"

namespace megapack {

// What is dealt. An item too large for one bin comes in chunks of one family, which one rank holds.
struct Items {
    std::int64_t kinds = 1;
    std::vector<std::int64_t> tokens, documents, family;  // per item; family -1: none
    std::vector<std::int64_t> cost;                       // of item i and kind k: [i * kinds + k]

    std::int64_t size() const { return static_cast<std::int64_t>(tokens.size()); }
};

struct Bin {
    std::int64_t micro_batch, first_rank, degree;
    std::int64_t tokens = 0, documents = 0;
    bool pinned = false;  // to its rank, by a family
    std::vector<std::int32_t> items{};
};

class Dealing {
  public:
    Dealing(const Items& items, const StepRules& rules, std::int64_t num_micro_batches)
        : items_(items), rules_(rules), num_micro_batches_(num_micro_batches) {}

    // A bin for every rank and micro batch. The dearest item first (longest, by_tokens) into the
    // bin with least work (fewest tokens) that has room. False where an item has room nowhere.
    bool deal_dearest_first(bool by_tokens);

    // The longest item first into the fullest bin with room. False where one has room nowhere.
    bool deal_best_fit();

    // As somebody else dealt them.
    void take(std::vector<Bin> bins);

    // Bins of like work become one micro batch, in which the dearest goes to the rank with least
    // work so far. For bins of one rank each.
    void arrange();

    // Exchanges items between the busiest and others as long as that pays, at most so many looks.
    void improve(std::int64_t looks);

    std::int64_t num_micro_batches() const { return num_micro_batches_; }
    const std::vector<Bin>& bins() const { return bins_; }

  private:
    friend class Exchange;

    void open_bins();
    bool place_families();
    bool has_room(const Bin& bin, std::int64_t item) const {
        return bin.tokens + items_.tokens[item] <= bin.degree * rules_.max_tokens &&
               bin.documents + items_.documents[item] <= rules_.max_documents;
    }
    void put(std::int64_t item, std::int64_t bin);
    void fill_empty_bins();
    // The largest of a bin's costs, of one of its ranks.
    std::int64_t work(std::int64_t bin) const;
    std::vector<std::int64_t> by_falling_work() const;
    std::int64_t least_objective() const;

    const Items& items_;
    const StepRules& rules_;
    std::int64_t num_micro_batches_;
    std::vector<Bin> bins_;
    std::vector<std::int64_t> cost_;  // of bin b and kind k, of all its ranks: [b * kinds + k]
};

}  // namespace megapack
