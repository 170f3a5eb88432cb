// The documents a strategy packs, in the order in which it takes them. Id is the type of a document
// number, Length that of a document length: int32 each as long as it suffices, int64 beyond.
#pragma once

#include <cstdint>

#include "core/base/span.hpp"
#include "core/packing/lengths.hpp"

namespace megapack {

// Instantiates a strategy for the widths that occur. (Few documents of more than 2^31 - 1 tokens
// are packed with wide numbers, too; `pack` narrows them.)
#define MEGAPACK_FOR_EACH_WIDTH(INSTANTIATE) \
    INSTANTIATE(std::int32_t, std::int32_t)  \
    INSTANTIATE(std::int64_t, std::int32_t)  \
    INSTANTIATE(std::int64_t, std::int64_t)

template <typename Id, typename Length>
struct Item {
    Id document;
    Length length;
};

// File order, or the order of `items`.
template <typename Id, typename Length>
struct Documents {
    Span<const Length> lengths;               // of all documents, in file order
    const Item<Id, Length>* items = nullptr;  // null: file order
    std::int64_t count = 0;                   // how many are taken
    std::int64_t longest = kMaxTokens;        // none of them is longer

    std::int64_t size() const { return count; }
    Item<Id, Length> operator[](std::int64_t i) const {
        if (items != nullptr) return items[i];
        return {static_cast<Id>(i), lengths[i]};
    }

    // loop(item_at) with item_at(i) = (*this)[i], the order decided once: for inner loops.
    template <typename Loop>
    auto in_order(Loop loop) const {
        if (items != nullptr) return loop([from = items](std::int64_t i) { return from[i]; });
        return loop([from = lengths.data()](std::int64_t i) {
            return Item<Id, Length>{static_cast<Id>(i), from[i]};
        });
    }
};

template <typename Id, typename Length>
Documents<Id, Length> in_file_order(const Lengths<Length>& lengths) {
    return {lengths, nullptr, lengths.size(), lengths.totals().longest};
}

}  // namespace megapack
