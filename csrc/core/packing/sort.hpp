// Documents cut at a capacity, with their rests sorted by length (a stable counting sort).
//
// A document of `length` tokens consists of floor(length / capacity) full chunks, a sample each,
// and a rest of length mod capacity tokens: the whole document if it is shorter than the capacity,
// else its tail. Strategies pack the rests; class l contains the rests of length l. Capacity 8:
//
//     documents of 3, 9, 20 and 3 tokens  ->  chunks {1, 2, 2}, rests ids {~1, 0, 3, ~2}
#pragma once

#include "core/packing/documents.hpp"

namespace megapack {

// How a document of at least `capacity` tokens is cut.
struct PlainCut {
    std::int64_t capacity;

    std::int64_t num_chunks(std::int64_t length) const { return length / capacity; }
    std::int64_t tail(std::int64_t length) const { return length % capacity; }
    // Returns the position in the document at which chunk k begins.
    std::int64_t begin(std::int64_t /*length*/, std::int64_t k) const { return k * capacity; }
};

// Rests by length; equal lengths in document order. A tail is stored as ~document.
template <typename Id>
struct SortedRests {
    Buffer<Id> ids;
    std::vector<std::int64_t> class_begin;  // (classes + 1): offset of class l in `ids`
};

template <typename Id, typename Length, typename Cut = PlainCut>
class LengthSort {
  public:
    // Counts the classes. The result does not depend on `threads`.
    LengthSort(const Documents<Id, Length>& documents, Cut cut, int threads)
        : documents_(documents),
          cut_(cut),
          num_classes_(std::min(cut.capacity, documents.longest + 1)),
          threads_(threads),
          next_(threads),
          next_chunk_(threads, 0),
          counts_(num_classes_, 0) {
        for_each_part(threads_, documents_.size(), threads_,
                      [&](std::int64_t p, Part range) { count(p, range); });
        for (const auto& part : next_)
            for (std::int64_t l = 1; l < num_classes_; ++l) counts_[l] += part[l];
        num_chunks_ = lay_out(next_chunk_);
    }

    // Returns the number of rests by length, up to the longest possible one; counts()[0] is 0.
    const std::vector<std::int64_t>& counts() const { return counts_; }
    std::int64_t num_chunks() const { return num_chunks_; }
    std::int64_t num_rests() const {
        std::int64_t sum = 0;
        for (const std::int64_t count : counts_) sum += count;
        return sum;
    }

    // Memory of the counts, which sort() turns into positions.
    std::int64_t num_bytes() const {
        return num_classes_ *
               static_cast<std::int64_t>(threads_ * sizeof(Id) + sizeof(std::int64_t));
    }

    // Sorts; may be called once. Calls on_chunk(chunk, document, begin) for every full chunk,
    // numbered in document order.
    template <typename OnChunk>
    SortedRests<Id> sort(OnChunk on_chunk) {
        SortedRests<Id> sorted{Buffer<Id>(num_rests()), lay_out(next_, num_classes_)};
        for_each_part(threads_, documents_.size(), threads_, [&](std::int64_t p, Part range) {
            scatter(p, range, sorted.ids.data(), on_chunk);
        });
        return sorted;
    }

  private:
    // Documents between a prefetch and its write: the classes exceed the nearest caches.
    static constexpr std::int64_t kAhead = 128;

    void count(std::int64_t p, Part range) {
        next_[p].assign(num_classes_, 0);
        Id* counts = next_[p].data();
        for (std::int64_t i = range.begin; i < range.end; ++i) {
            const std::int64_t length = documents_[i].length;
            if (length < cut_.capacity) {
                ++counts[length];
            } else {
                next_chunk_[p] += cut_.num_chunks(length);
                ++counts[cut_.tail(length)];
            }
        }
        counts[0] = 0;
    }

    template <typename OnChunk>
    void scatter(std::int64_t p, Part range, Id* ids, OnChunk on_chunk) {
        Id* const next = next_[p].data();
        std::int64_t chunk = next_chunk_[p];
        const Cut cut = cut_;
        const std::int64_t last_class = num_classes_ - 1;
        const auto place = [=, &chunk](Item<Id, Length> item) {
            const std::int64_t length = item.length;
            if (length < cut.capacity) {
                if (length > 0) ids[next[length]++] = item.document;
                return;
            }
            const std::int64_t chunks = cut.num_chunks(length), tail = cut.tail(length);
            for (std::int64_t k = 0; k < chunks; ++k)
                on_chunk(chunk++, item.document, static_cast<Length>(cut.begin(length, k)));
            if (tail > 0) ids[next[tail]++] = static_cast<Id>(~item.document);
        };
        documents_.in_order([&](auto item_at) {
            std::int64_t i = range.begin;
            for (; i + kAhead < range.end; ++i) {
                const std::int64_t ahead = item_at(i + kAhead).length;
                __builtin_prefetch(ids + next[std::min(ahead, last_class)], 1);  // for writing
                place(item_at(i));
            }
            for (; i < range.end; ++i) place(item_at(i));
        });
    }

    Documents<Id, Length> documents_;
    Cut cut_;
    std::int64_t num_classes_;
    int threads_;
    std::vector<std::vector<Id>> next_;  // per part: counts, then positions
    std::vector<std::int64_t> next_chunk_;
    std::vector<std::int64_t> counts_;
    std::int64_t num_chunks_ = 0;
};

// Document and start position of the rest `id` (see SortedRests) of `length` tokens.
template <typename Id, typename Length>
struct Rest {
    Id document;
    Length begin;

    Rest(Id id, std::int64_t length, Span<const Length> lengths) : document(id), begin(0) {
        if (id >= 0) return;
        document = static_cast<Id>(~id);
        begin = static_cast<Length>(lengths[document] - length);
    }
};

}  // namespace megapack
