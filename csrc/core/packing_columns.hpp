// Many samples of the same lengths, written column by column: segment k of all of them, then
// segment k + 1. Such a loop reads one class in order and does nothing else.
#pragma once

#include <algorithm>
#include <vector>

#include "core/packing_sort.hpp"

namespace megapack {

// Sample i has `kept` tokens of the rest ids[first + i * stride], which is `length` tokens long.
struct Column {
    std::int64_t first, stride;
    std::int32_t length, kept;
};

// Samples [begin, end) of `columns` to sample `sample`, segment `segment` of `out` and following.
template <typename Id, typename Length>
void write_columns(const Samples<Id, Length>& out, const std::vector<Column>& columns,
                   const SortedRests<Id>& sorted, Span<const Length> lengths, std::int64_t begin,
                   std::int64_t end, std::int64_t sample, std::int64_t segment) {
    const auto width = static_cast<std::int64_t>(columns.size());
    // A block of segments stays in the nearest cache while its columns are filled in.
    const std::int64_t block = std::max<std::int64_t>(1024 / width, 1);
    for (; begin < end; begin += block, sample += block, segment += block * width) {
        const std::int64_t count = std::min(block, end - begin);
        for (std::int64_t i = 0; i < count; ++i) out.open_sample(sample + i, segment + i * width);
        std::int64_t at = segment;
        for (const Column& column : columns) {
            const Id* ids = sorted.ids.data() + column.first;
            for (std::int64_t i = 0; i < count; ++i) {
                const Id id = ids[(begin + i) * column.stride];
                const Rest<Id, Length> rest(id, column.length, lengths);
                out.put(at + i * width, rest.document, rest.begin, column.kept);
            }
            ++at;
        }
    }
}

}  // namespace megapack
