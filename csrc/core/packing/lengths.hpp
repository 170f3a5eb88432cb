// Document lengths, checked in the one pass that reads them all. Strategies take Lengths and
// nothing else, so none of them meets a negative length or a sum that 64 bits cannot hold.
#pragma once

#include <cstdint>

#include "core/base/span.hpp"

namespace megapack {

// What may be packed at once; a few such sums and a capacity together stay below 2^63.
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 62;

struct LengthTotals {
    std::int64_t num_tokens = 0;
    std::int64_t longest = 0;
    std::int64_t num_empty = 0;
    std::int64_t num_longer = 0;  // than the capacity asked about
};

// Length: int32, int64 or uint64. Throws DataError for a length below 0 and for more than
// kMaxTokens in all. capacity >= 0.
template <typename Length>
LengthTotals check_lengths(Span<const Length> lengths, std::int64_t capacity = kMaxTokens);

// Lengths that passed the check; the caller keeps them alive and unchanged.
template <typename Length>
class Lengths {
  public:
    explicit Lengths(Span<const Length> lengths, std::int64_t capacity = kMaxTokens)
        : lengths_(lengths), totals_(check_lengths(lengths, capacity)) {}

    operator Span<const Length>() const { return lengths_; }
    std::int64_t size() const { return lengths_.size(); }
    const LengthTotals& totals() const { return totals_; }

  private:
    Span<const Length> lengths_;
    LengthTotals totals_;
};

}  // namespace megapack
