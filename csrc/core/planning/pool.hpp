// Documents that are left, found by their length: a few whose lengths make an exact sum.
#pragma once

#include <vector>

#include "core/planning/groups.hpp"

namespace megapack {

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

}  // namespace megapack
