// Groups of ranks that share documents in one micro batch, and what they hold so far.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/span.hpp"
#include "core/planning/step_plan.hpp"

namespace megapack {

struct Document {
    std::int64_t length, id;

    std::int64_t square() const { return length * length; }
};

struct Group {
    std::int64_t micro_batch, first_rank, degree;
    std::int64_t tokens = 0, squares = 0, documents = 0;
};

class Groups {
  public:
    // `mean_tokens`: what a rank holds in a micro batch when all hold as much.
    Groups(const StepRules& rules, std::int64_t num_micro_batches, std::int64_t mean_tokens,
           std::int64_t num_documents)
        : rules_(rules),
          mean_tokens_(mean_tokens),
          next_rank_(num_micro_batches, 0),
          group_of_(num_documents, -1) {}

    const StepRules& rules() const { return rules_; }
    std::int64_t mean_tokens() const { return mean_tokens_; }
    std::int64_t num_micro_batches() const { return ssize(next_rank_); }
    std::int64_t size() const { return ssize(groups_); }
    const Group& operator[](std::int64_t g) const { return groups_[g]; }

    std::int64_t free_ranks(std::int64_t micro_batch) const {
        return rules_.num_ranks - next_rank_[micro_batch];
    }
    // A group of the next free ranks. Degrees never grow within a micro batch, so that its first
    // rank is a multiple of its degree.
    std::int64_t open(std::int64_t micro_batch, std::int64_t degree) {
        groups_.push_back({micro_batch, next_rank_[micro_batch], degree});
        next_rank_[micro_batch] += degree;
        return size() - 1;
    }

    // Tokens that still go into a group; 0 where it may hold no other document.
    std::int64_t room(std::int64_t g) const {
        const Group& group = groups_[g];
        const bool full = group.documents == rules_.max_documents;
        return full ? 0 : group.degree * rules_.max_tokens - group.tokens;
    }
    // Tokens by which a group is short of `per_rank` (negative where it has more).
    std::int64_t missing(std::int64_t g, std::int64_t per_rank) const {
        return groups_[g].degree * per_rank - groups_[g].tokens;
    }

    void place(const Document& document, std::int64_t g) {
        groups_[g].tokens += document.length;
        groups_[g].squares += document.square();
        ++groups_[g].documents;
        group_of_[document.id] = g;
    }

    std::int64_t group_of(std::int64_t document) const { return group_of_[document]; }

  private:
    const StepRules& rules_;
    std::int64_t mean_tokens_;
    std::vector<std::int64_t> next_rank_;  // per micro batch
    std::vector<Group> groups_;
    std::vector<std::int64_t> group_of_;  // per document
};

// Deals documents, longest first, to groups that it opens on all ranks of all micro batches, none
// of fewer ranks than `least_degree` unless no more are left. The first `num_long` decide the
// groups. False where one has no room.
bool deal_shared(Groups& groups, const std::vector<Document>& longest_first, std::int64_t num_long,
                 std::int64_t least_degree);

}  // namespace megapack
