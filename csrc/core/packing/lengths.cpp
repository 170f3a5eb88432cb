#include "core/packing/lengths.hpp"

#include <algorithm>
#include <limits>
#include <type_traits>

#include "core/base/check.hpp"

namespace megapack {
namespace {

// A block's sum and counts fit where the vector registers keep them.
constexpr std::int64_t kBlock = std::int64_t{1} << 16;

__extension__ using Wide = unsigned __int128;

template <typename Length>
void refuse_negative(Span<const Length> lengths) {
    const Length* at = std::find_if(lengths.begin(), lengths.end(), [](Length x) { return x < 0; });
    throw DataError(concat_message("document ", at - lengths.begin(), " has length ", *at,
                                   "; it must not be below 0"));
}

}  // namespace

template <typename Length>
LengthTotals check_lengths(Span<const Length> lengths, std::int64_t capacity) {
    using Unsigned = std::make_unsigned_t<Length>;
    // 2^16 narrow lengths fit in 64 bits, wide ones need more.
    using Sum = std::conditional_t<sizeof(Length) == 4, std::uint64_t, Wide>;
    constexpr std::uint64_t kLongest = std::numeric_limits<Length>::max();
    const auto limit =
        static_cast<Length>(std::min(static_cast<std::uint64_t>(capacity), kLongest));
    LengthTotals totals;
    Length bits = 0, longest = 0;
    Wide tokens = 0;
    for (std::int64_t begin = 0; begin < lengths.size(); begin += kBlock) {
        const std::int64_t end = std::min(begin + kBlock, lengths.size());
        Sum sum = 0;
        Unsigned num_empty = 0, num_longer = 0;
        for (std::int64_t i = begin; i < end; ++i) {
            const Length length = lengths[i];
            bits |= length;
            longest = std::max(longest, length);
            sum += static_cast<Unsigned>(length);
            num_empty += length == 0 ? 1 : 0;
            num_longer += length > limit ? 1 : 0;
        }
        tokens += sum;
        totals.num_empty += static_cast<std::int64_t>(num_empty);
        totals.num_longer += static_cast<std::int64_t>(num_longer);
    }
    if constexpr (std::is_signed_v<Length>)
        if (bits < 0) refuse_negative(lengths);
    check<DataError>(tokens <= static_cast<Wide>(kMaxTokens), lengths.size(),
                     " documents have more than 2^62 tokens in all (the longest has ", longest,
                     "); are these numbers lengths in tokens?");
    totals.num_tokens = static_cast<std::int64_t>(tokens);
    totals.longest = static_cast<std::int64_t>(longest);
    return totals;
}

template LengthTotals check_lengths(Span<const std::int32_t>, std::int64_t);
template LengthTotals check_lengths(Span<const std::int64_t>, std::int64_t);
template LengthTotals check_lengths(Span<const std::uint64_t>, std::int64_t);

}  // namespace megapack
