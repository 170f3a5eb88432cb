// What every packing strategy takes and gives. Id is the type of a document number, Length that of
// a document length: int32 each as long as it suffices, int64 beyond.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/buffer.hpp"
#include "core/base/check.hpp"
#include "core/base/span.hpp"
#include "core/packing/lengths.hpp"
#include "core/packing/run.hpp"

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

// The documents in the order a strategy takes them: file order, or the order of `items`.
template <typename Id, typename Length>
struct Documents {
    Span<const Length> lengths;               // of all documents, in file order
    const Item<Id, Length>* items = nullptr;  // null: file order
    std::size_t count = 0;                    // how many are taken

    std::size_t size() const { return count; }
    Item<Id, Length> operator[](std::size_t i) const {
        if (items != nullptr) return items[i];
        return {static_cast<Id>(i), lengths[i]};
    }

    // run(item_at) with item_at(i) = (*this)[i], the order decided once: for inner loops.
    template <typename Run>
    auto in_order(Run run) const {
        if (items != nullptr) return run([from = items](std::size_t i) { return from[i]; });
        return run([from = lengths.data()](std::size_t i) {
            return Item<Id, Length>{static_cast<Id>(i), from[i]};
        });
    }
};

template <typename Id, typename Length>
Documents<Id, Length> in_file_order(const Lengths<Length>& lengths) {
    return {lengths, nullptr, lengths.size()};
}

// Samples grouped by bucket; `design.md` names the arrays. segment_* have one entry per segment.
template <typename Id, typename Length>
struct Samples {
    std::vector<std::int64_t> bucket_capacity;
    std::vector<std::int64_t> bucket_sample_offsets;
    Buffer<std::int64_t> sample_segment_offsets;
    Buffer<Id> segment_document;
    Buffer<Length> segment_begin;
    Buffer<std::int32_t> segment_length;
    std::int64_t dropped_tokens = 0;
    std::int64_t repeated_tokens = 0;

    Samples() = default;
    // samples_in_bucket[b] samples in bucket b; `num_segments` may be an upper bound.
    Samples(const std::vector<std::int64_t>& capacities,
            const std::vector<std::int64_t>& samples_in_bucket, std::int64_t num_segments)
        : bucket_capacity(capacities), bucket_sample_offsets{0} {
        for (const std::int64_t count : samples_in_bucket)
            bucket_sample_offsets.push_back(bucket_sample_offsets.back() + count);
        const auto segments = static_cast<std::size_t>(num_segments);
        sample_segment_offsets =
            Buffer<std::int64_t>(static_cast<std::size_t>(bucket_sample_offsets.back()) + 1);
        segment_document = Buffer<Id>(segments);
        segment_begin = Buffer<Length>(segments);
        segment_length = Buffer<std::int32_t>(segments);
        sample_segment_offsets[sample_segment_offsets.size() - 1] = num_segments;
    }

    std::int64_t num_samples() const { return bucket_sample_offsets.back(); }

    void put(std::int64_t segment, Id document, Length begin, std::int32_t length) const {
        const auto at = static_cast<std::size_t>(segment);
        segment_document[at] = document;
        segment_begin[at] = begin;
        segment_length[at] = length;
    }
    void open_sample(std::int64_t sample, std::int64_t segment) const {
        sample_segment_offsets[static_cast<std::size_t>(sample)] = segment;
    }
    // The upper bounds of the constructor become the numbers there really are; samples leave the
    // last bucket.
    void truncate(std::int64_t samples, std::int64_t segments) {
        bucket_sample_offsets.back() = samples;
        sample_segment_offsets.truncate(static_cast<std::size_t>(samples) + 1);
        const auto size = static_cast<std::size_t>(segments);
        segment_document.truncate(size);
        segment_begin.truncate(size);
        segment_length.truncate(size);
        sample_segment_offsets[static_cast<std::size_t>(samples)] = segments;
    }
};

}  // namespace megapack
