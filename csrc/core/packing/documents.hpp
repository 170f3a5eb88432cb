// Inputs of every strategy, and the orders that strategies share.
//
//     Lengths<Length>          document lengths, checked in one pass
//     Run                      seed, threads, progress
//     Documents<Id, Length>    documents in the order in which a strategy takes them
//     split_at_random          documents in random groups
//     shuffle                  documents in random order
//
// Id is the type of a document number, Length that of a document length: int32 if it suffices, else
// int64, because packing is bound by memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/base/buffer.hpp"
#include "core/base/check.hpp"
#include "core/base/parallel.hpp"
#include "core/base/random.hpp"
#include "core/base/span.hpp"

namespace megapack {

// Maximum number of tokens of a packing. A few such sums plus a capacity stay below 2^63.
constexpr std::int64_t kMaxTokens = std::int64_t{1} << 62;

struct LengthTotals {
    std::int64_t num_tokens = 0;
    std::int64_t longest = 0;
    std::int64_t num_empty = 0;
    std::int64_t num_longer = 0;  // documents longer than `capacity`
};

// Sums lengths of type int32, int64 or uint64. Throws DataError for a length below 0 and for more
// than kMaxTokens in all. Requires capacity >= 0.
template <typename Length>
LengthTotals check_lengths(Span<const Length> lengths, std::int64_t capacity = kMaxTokens) {
    // Blocks are small enough that their sums and counts stay in vector registers: 2^16 lengths of
    // 32 bits fit a sum of 64 bits, wider lengths need 128.
    constexpr std::int64_t kBlock = std::int64_t{1} << 16;
    __extension__ using WideSum = unsigned __int128;
    using Unsigned = std::make_unsigned_t<Length>;
    using Sum = std::conditional_t<sizeof(Length) == 4, std::uint64_t, WideSum>;
    constexpr std::uint64_t kLongest = std::numeric_limits<Length>::max();
    const auto limit =
        static_cast<Length>(std::min(static_cast<std::uint64_t>(capacity), kLongest));
    LengthTotals totals;
    Length bits = 0, longest = 0;
    WideSum tokens = 0;
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
        if (bits < 0) {
            const Length* at =
                std::find_if(lengths.begin(), lengths.end(), [](Length x) { return x < 0; });
            check<DataError>(false, "document ", at - lengths.begin(), " has length ", *at,
                             "; it must not be below 0");
        }
    check<DataError>(tokens <= static_cast<WideSum>(kMaxTokens), lengths.size(),
                     " documents have more than 2^62 tokens in all (the longest has ", longest,
                     "); are these numbers lengths in tokens?");
    totals.num_tokens = static_cast<std::int64_t>(tokens);
    totals.longest = static_cast<std::int64_t>(longest);
    return totals;
}

// Checked lengths; the caller keeps them alive and unchanged. Strategies accept only these, so no
// length is negative and no sum exceeds 64 bits.
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

// ---- A run: arguments that all strategies share

constexpr int kMaxThreads = 1024;

inline int checked_threads(std::int64_t threads) {
    check(threads >= 1 && threads <= kMaxThreads, "threads is ", threads, "; it must be from 1 to ",
          kMaxThreads);
    return static_cast<int>(threads);
}

// The result does not depend on `threads`.
struct Run {
    Run(std::uint64_t seed_, std::int64_t threads_, Progress& progress_)
        : seed(seed_), threads(checked_threads(threads_)), progress(progress_) {}

    std::uint64_t seed;
    int threads;
    Progress& progress;
};

// Documents per part; a task reports progress after each part. The tests of the core set a small
// number, so that small inputs have many parts.
#ifndef MEGAPACK_PART_SIZE
#define MEGAPACK_PART_SIZE (std::int64_t{1} << 20)
#endif

constexpr std::int64_t num_parts(std::int64_t size) {
    return (size + MEGAPACK_PART_SIZE - 1) / MEGAPACK_PART_SIZE;
}

// Calls visit(part, its range) for all documents in parallel, with progress.
template <typename Visit>
void for_each_part(const Run& run, std::int64_t size, Visit visit) {
    for_each_part(run.threads, size, num_parts(size), [&](std::int64_t p, Part range) {
        visit(p, range);
        run.progress.advance(range.size());
    });
}

// ---- Documents in an order

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
    std::int64_t count = 0;                   // documents in this order
    std::int64_t longest = kMaxTokens;        // upper bound of their lengths

    std::int64_t size() const { return count; }
    Item<Id, Length> operator[](std::int64_t i) const {
        if (items != nullptr) return items[i];
        return {static_cast<Id>(i), lengths[i]};
    }

    // Calls loop(item_at) with item_at(i) = (*this)[i]: checks `items` once, not per document.
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

// Fisher and Yates: for k = size - 1 ... 1, swap(k, chance.below(k, k + 1)).
template <typename Swap>
void swap_at_random(std::int64_t size, Random chance, Swap swap) {
    for (std::int64_t k = size; k-- > 1;)
        swap(k, static_cast<std::int64_t>(chance.below(k, k + 1)));
}

template <typename Id, typename Length>
struct RandomGroups {
    Buffer<Item<Id, Length>> items;     // group after group
    std::vector<std::int64_t> offsets;  // (groups + 1): positions in `items`
};

// Puts document i into group chance.below(i, num_groups); a group keeps file order.
template <typename Id, typename Length>
RandomGroups<Id, Length> split_at_random(Span<const Length> lengths, std::int64_t num_groups,
                                         Random chance, int threads) {
    const std::int64_t n = lengths.size();
    const auto group_of = [&](std::int64_t i) { return chance.below(i, num_groups); };
    // next[part][group]: first a count, then the position of the next document.
    std::vector<std::vector<std::int64_t>> next(threads, std::vector<std::int64_t>(num_groups, 0));
    for_each_part(threads, n, threads, [&](std::int64_t p, Part range) {
        std::int64_t* const counts = next[p].data();
        for (std::int64_t i = range.begin; i < range.end; ++i) ++counts[group_of(i)];
    });
    RandomGroups<Id, Length> result{Buffer<Item<Id, Length>>(n), lay_out(next, num_groups)};
    for_each_part(threads, n, threads, [&](std::int64_t p, Part range) {
        std::int64_t* const position = next[p].data();
        Item<Id, Length>* const items = result.items.data();
        for (std::int64_t i = range.begin; i < range.end; ++i) {
            Item<Id, Length>* const item = items + position[group_of(i)]++;
            // There are more groups than the hardware prefetcher follows: fetch the next line.
            __builtin_prefetch(item + 64 / sizeof(*item), 1);
            *item = {static_cast<Id>(i), lengths[i]};
        }
    });
    return result;
}

// Returns the documents in a uniformly random order: split_at_random with chance.child(0) into
// G = min(4096, ceil(n / 32768)) groups, then swap_at_random in group g with
// chance.child(1).child(g). A group fits in the processor's cache, but all documents would not.
template <typename Id, typename Length>
Buffer<Item<Id, Length>> shuffle(Span<const Length> lengths, Random chance, int threads) {
    constexpr std::int64_t kGroupSize = std::int64_t{1} << 15, kMaxGroups = std::int64_t{1} << 12;
    const std::int64_t groups =
        std::clamp((lengths.size() + kGroupSize - 1) / kGroupSize, std::int64_t{1}, kMaxGroups);
    RandomGroups<Id, Length> grouped =
        split_at_random<Id, Length>(lengths, groups, chance.child(0), threads);
    parallel_for(threads, groups, [&](std::int64_t g) {
        Item<Id, Length>* items = grouped.items.data() + grouped.offsets[g];
        swap_at_random(grouped.offsets[g + 1] - grouped.offsets[g], chance.child(1).child(g),
                       [&](std::int64_t k, std::int64_t j) { std::swap(items[k], items[j]); });
    });
    return std::move(grouped.items);
}

// Calls pack(documents) with the documents in file order or, if `shuffled`, in seeded order.
template <typename Id, typename Length, typename Pack>
auto pack_in_order(const Lengths<Length>& lengths, bool shuffled, const Run& run, Pack pack) {
    Documents<Id, Length> documents = in_file_order<Id>(lengths);
    if (!shuffled) return pack(documents);
    const auto order = shuffle<Id, Length>(documents.lengths,
                                           random_for(run.seed, Purpose::kDocuments), run.threads);
    documents.items = order.data();
    return pack(documents);
}

}  // namespace megapack
