// Memory-mapped arrays into the page cache before they are read.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/span.hpp"
#include "core/gather/shard.hpp"

namespace megapack {

// Asks the kernel to read these bytes ahead. Advice: for memory that is no mapping it does nothing.
void will_need(Span<const std::uint8_t> bytes);

// Tells it that the arrays of tokens, labels and weights are read in no order: what is read is then
// what was asked for, and not what lies around it (by default 128 KiB for every missing page).
void read_exactly(Span<const Shard> shards);

// Tokens [begin, end) of a shard, and as many labels and weights where it has them.
struct TokenRange {
    std::int64_t shard;
    std::int64_t begin;
    std::int64_t end;
};

// What a gather of these samples reads, by shard and position; no two ranges of a shard touch.
// Throws as read_segments does.
std::vector<TokenRange> token_ranges(Span<const Shard> shards, Span<const SampleRef> samples);

// As will_need, for what a gather of these samples reads of tokens, labels and weights: a
// request for every run of touching pages. Returns how many bytes they are. Throws as read_segments
// does.
std::int64_t will_need_samples(Span<const Shard> shards, Span<const SampleRef> samples);

}  // namespace megapack
