// Helpers of the tests of the packing core.
#pragma once

#include "core/index/view.hpp"
#include "core/packing/strategy.hpp"
#include "require.hpp"

template <typename Id, typename Length>
megapack::SampleView view_of(const megapack::Samples<Id, Length>& samples) {
    using Offsets = megapack::Span<const std::int64_t>;
    return {Offsets(samples.bucket_sample_offsets), Offsets(samples.sample_segment_offsets),
            megapack::Span<const Id>(samples.segment_document),
            megapack::Span<const Length>(samples.segment_begin),
            megapack::Span<const std::int32_t>(samples.segment_length)};
}
