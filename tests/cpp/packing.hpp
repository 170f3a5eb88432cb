// What the programs of the packing core share.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

#include "core/index/view.hpp"
#include "core/packing/strategy.hpp"

inline void require(bool ok, const std::string& what) {
    if (ok) return;
    std::printf("failed: %s\n", what.c_str());
    std::exit(1);
}

template <typename Id, typename Length>
megapack::SampleView view_of(const megapack::Samples<Id, Length>& samples) {
    using Offsets = megapack::Span<const std::int64_t>;
    return {Offsets(samples.bucket_sample_offsets), Offsets(samples.sample_segment_offsets),
            megapack::Span<const Id>(samples.segment_document),
            megapack::Span<const Length>(samples.segment_begin),
            megapack::Span<const std::int32_t>(samples.segment_length)};
}
