#include "core/gather/read_ahead.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

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

// Whether the advice was taken does not matter.
std::int64_t advise(Pages pages, int advice) {
    const std::uintptr_t size = pages.end - pages.begin;
    static_cast<void>(madvise(reinterpret_cast<void*>(pages.begin), size, advice));
    return static_cast<std::int64_t>(size);
}

// The last token of a segment has the next one of its document as its label.
void add_pages(const TokenArray& array, const Segment& segment, std::vector<Pages>& out) {
    if (array.data == nullptr) return;
    const std::int64_t itemsize = bytes_of(array.type);
    const std::int64_t length = segment.length + (segment.ends_document ? 0 : 1);
    const auto* data = static_cast<const std::uint8_t*>(array.data);
    out.push_back(pages_of(data + segment.token_begin * itemsize, length * itemsize));
}

}  // namespace

void will_need(Span<const std::uint8_t> bytes) {
    advise(pages_of(bytes.data(), bytes.size()), MADV_WILLNEED);
}

void read_exactly(Span<const GatherSource> sources) {
    for (const GatherSource& source : sources) {
        for (const TokenArray& array : {source.tokens, source.labels}) {
            advise(pages_of(array.data, array.size * bytes_of(array.type)), MADV_RANDOM);
        }
    }
}

std::int64_t will_need_samples(Span<const GatherSource> sources, Span<const SampleRef> samples) {
    std::vector<Segment> segments;
    std::vector<Pages> wanted;
    for (const SampleRef& sample : samples) {
        const GatherSource& source = sources[sample.shard];
        segments.clear();
        read_segments(source, sample, segments);
        for (const Segment& segment : segments) {
            add_pages(source.tokens, segment, wanted);
            add_pages(source.labels, segment, wanted);
        }
    }
    std::sort(wanted.begin(), wanted.end(),
              [](const Pages& a, const Pages& b) { return a.begin < b.begin; });
    std::int64_t num_bytes = 0;
    for (std::size_t i = 0; i < wanted.size();) {
        Pages run = wanted[i];
        for (++i; i < wanted.size() && wanted[i].begin <= run.end; ++i) {
            run.end = std::max(run.end, wanted[i].end);
        }
        num_bytes += advise(run, MADV_WILLNEED);
    }
    return num_bytes;
}

}  // namespace megapack
