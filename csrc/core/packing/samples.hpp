// What every packing strategy gives.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/buffer.hpp"

namespace megapack {

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
        sample_segment_offsets = Buffer<std::int64_t>(num_samples() + 1);
        segment_document = Buffer<Id>(num_segments);
        segment_begin = Buffer<Length>(num_segments);
        segment_length = Buffer<std::int32_t>(num_segments);
        sample_segment_offsets[num_samples()] = num_segments;
    }

    std::int64_t num_samples() const { return bucket_sample_offsets.back(); }

    void put(std::int64_t segment, Id document, Length begin, std::int32_t length) const {
        segment_document[segment] = document;
        segment_begin[segment] = begin;
        segment_length[segment] = length;
    }
    void open_sample(std::int64_t sample, std::int64_t segment) const {
        sample_segment_offsets[sample] = segment;
    }
    // The upper bounds of the constructor become the numbers there really are; samples leave the
    // last bucket.
    void truncate(std::int64_t samples, std::int64_t segments) {
        bucket_sample_offsets.back() = samples;
        sample_segment_offsets.truncate(samples + 1);
        segment_document.truncate(segments);
        segment_begin.truncate(segments);
        segment_length.truncate(segments);
        sample_segment_offsets[samples] = segments;
    }
};

// Removes the last sample of a one-bucket packing if it is not full; its tokens count as dropped.
template <typename Id, typename Length>
void drop_partial_sample(Samples<Id, Length>& samples) {
    const std::int64_t last = samples.num_samples() - 1;
    if (last < 0) return;
    const std::int64_t first = samples.sample_segment_offsets[last];
    std::int64_t tokens = 0;
    for (std::int64_t s = first; s < samples.segment_length.size(); ++s)
        tokens += samples.segment_length[s];
    if (tokens == samples.bucket_capacity.back()) return;
    samples.dropped_tokens += tokens;
    samples.truncate(last, first);
}

}  // namespace megapack
