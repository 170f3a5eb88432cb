// Readahead of memory-mapped arrays into the page cache.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/span.hpp"
#include "core/gather/shard.hpp"

namespace megapack {

// Asks the kernel to read these bytes ahead. Has no effect on memory that is not mapped.
void read_ahead(Span<const std::uint8_t> bytes);

// Turns off the kernel's readahead (by default 128 KiB per missing page) for tokens and all that is
// stored for them, which are read in random order.
void disable_readahead(Span<const Shard> shards);

// Tokens [begin, end) of a shard, with all that is stored for them.
struct TokenRange {
    std::int64_t shard;
    std::int64_t begin;
    std::int64_t end;
};

// Returns the tokens that a gather of these samples reads, by shard and position; ranges of a shard
// do not touch. Throws like read_segments.
std::vector<TokenRange> token_ranges(Span<const Shard> shards, Span<const SampleRef> samples);

// Asks the kernel to read the tokens of these samples ahead, with their labels, weights and
// columns: a request per range of contiguous pages. Returns the bytes. Throws like read_segments.
std::int64_t read_ahead_samples(Span<const Shard> shards, Span<const SampleRef> samples);

}  // namespace megapack
