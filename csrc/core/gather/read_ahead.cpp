#include "core/gather/read_ahead.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <tuple>
#include <utility>

namespace megapack {
namespace {

// Addresses of whole pages.
struct Pages {
    std::uintptr_t begin;
    std::uintptr_t end;
};

Pages pages_of(const void* data, std::int64_t num_bytes) {
    static const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto begin = reinterpret_cast<std::uintptr_t>(data);
    const std::uintptr_t end = begin + static_cast<std::uintptr_t>(num_bytes);
    return {begin / page * page, (end + page - 1) / page * page};
}

// Returns the bytes of the pages, whether or not the kernel follows the advice.
std::int64_t advise(Pages pages, int advice) {
    const std::uintptr_t size = pages.end - pages.begin;
    static_cast<void>(madvise(reinterpret_cast<void*>(pages.begin), size, advice));
    return static_cast<std::int64_t>(size);
}

// Merges touching and overlapping ranges of a shard.
std::vector<TokenRange> merged(std::vector<TokenRange> ranges) {
    std::sort(ranges.begin(), ranges.end(), [](const TokenRange& a, const TokenRange& b) {
        return std::tie(a.shard, a.begin) < std::tie(b.shard, b.begin);
    });
    std::vector<TokenRange> out;
    for (const TokenRange& range : ranges)
        if (!out.empty() && out.back().shard == range.shard && range.begin <= out.back().end)
            out.back().end = std::max(out.back().end, range.end);
        else
            out.push_back(range);
    return out;
}

}  // namespace

void read_ahead(Span<const std::uint8_t> bytes) {
    advise(pages_of(bytes.data(), bytes.size()), MADV_WILLNEED);
}

void disable_readahead(Span<const Shard> shards) {
    for (const Shard& shard : shards)
        shard.each_array([&](const std::uint8_t* data, std::int64_t width) {
            advise(pages_of(data, shard.tokens.size * width), MADV_RANDOM);
        });
}

std::vector<TokenRange> token_ranges(Span<const Shard> shards, Span<const SampleRef> samples) {
    std::vector<Segment> segments;
    std::vector<TokenRange> ranges;
    for (const SampleRef& sample : samples) {
        if (shards[sample.shard].has_trees()) {  // every document adds its labels and weights
            for (const TreeDocument& document : read_documents(shards[sample.shard], sample)) {
                const std::int64_t begin = document.token_begin;
                ranges.push_back({sample.shard, begin, begin + document.length});
            }
            continue;
        }
        segments.clear();
        read_segments(shards[sample.shard], sample, segments);
        for (const Segment& segment : segments) {
            // The label of the last token is the next token of the document.
            const std::int64_t length = segment.length + (segment.ends_document ? 0 : 1);
            ranges.push_back({sample.shard, segment.token_begin, segment.token_begin + length});
        }
    }
    return merged(std::move(ranges));
}

std::int64_t read_ahead_samples(Span<const Shard> shards, Span<const SampleRef> samples) {
    std::vector<Pages> wanted;
    for (const TokenRange& range : token_ranges(shards, samples)) {
        shards[range.shard].each_array([&](const std::uint8_t* data, std::int64_t width) {
            const std::int64_t num_bytes = (range.end - range.begin) * width;
            wanted.push_back(pages_of(data + range.begin * width, num_bytes));
        });
    }
    std::sort(wanted.begin(), wanted.end(),
              [](const Pages& a, const Pages& b) { return a.begin < b.begin; });
    std::int64_t num_bytes = 0;
    for (std::size_t i = 0; i < wanted.size();) {
        Pages run = wanted[i];
        for (++i; i < wanted.size() && wanted[i].begin <= run.end; ++i)
            run.end = std::max(run.end, wanted[i].end);
        num_bytes += advise(run, MADV_WILLNEED);
    }
    return num_bytes;
}

}  // namespace megapack
