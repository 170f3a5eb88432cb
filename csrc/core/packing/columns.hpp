// Samples with the same segment lengths, written column by column: segment k of all samples, then
// segment k + 1. Each loop reads the documents of one length in order.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "core/packing/sort.hpp"
#include "core/packing/strategy.hpp"

namespace megapack {

// Segment of sample i: the first `kept` of the `length` tokens of rest ids[first + i * stride].
struct Column {
    std::int64_t first, stride;
    std::int32_t length, kept;
};

// Samples per block: its segments stay in the nearest cache while the columns are written.
inline std::int64_t samples_in_block(const std::vector<Column>& columns) {
    return std::max<std::int64_t>(1024 / static_cast<std::int64_t>(columns.size()), 1);
}

// Prefetches the rests of samples [begin, end), one block: columns are too short for the hardware
// prefetcher to notice them in time.
template <typename Id>
void prefetch_columns(const std::vector<Column>& columns, const SortedRests<Id>& sorted,
                      std::int64_t begin, std::int64_t end) {
    constexpr std::int64_t kLine = 64 / sizeof(Id);
    for (const Column& column : columns) {
        const Id* ids = sorted.ids.data() + column.first;
        for (std::int64_t i = begin * column.stride; i < end * column.stride; i += kLine)
            __builtin_prefetch(ids + i);
    }
}

// Writes where tails begin in their documents. This follows from the document's length, at a random
// address: the length is prefetched first and read some tails later.
template <typename Id, typename Length>
class TailBegins {
  public:
    TailBegins(const Samples<Id, Length>& out, Span<const Length> lengths)
        : begins_(out.segment_begin.data()), lengths_(lengths) {}

    void put(std::int64_t segment, Id document, std::int32_t tail) {
        if (put_ - written_ == kWaiting) write_oldest();
        waiting_[put_++ % kWaiting] = {segment, document, tail};
        __builtin_prefetch(lengths_.data() + document);
    }
    void finish() {
        while (written_ < put_) write_oldest();
    }

  private:
    struct Tail {
        std::int64_t segment;
        Id document;
        std::int32_t length;
    };
    static constexpr std::uint32_t kWaiting = 16;

    void write_oldest() {
        const Tail& tail = waiting_[written_++ % kWaiting];
        const Length length = lengths_[tail.document];
        begins_[tail.segment] = static_cast<Length>(length - tail.length);
    }

    Length* begins_;
    Span<const Length> lengths_;
    std::array<Tail, kWaiting> waiting_;
    std::uint32_t put_ = 0, written_ = 0;  // both wrap at 2^32
};

// Writes lengths and start positions of segments [segment, segment + rows * columns.size()):
// lengths repeat from sample to sample, start positions are 0 (TailBegins corrects those of tails).
template <typename Id, typename Length>
void write_pattern(const Samples<Id, Length>& out, const std::vector<Column>& columns,
                   std::int64_t segment, std::int64_t rows) {
    const std::int64_t width = columns.size(), size = rows * width;
    std::int32_t* const length = out.segment_length.data() + segment;
    for (std::int64_t k = 0; k < width; ++k) length[k] = columns[k].kept;
    for (std::int64_t done = width; done < size; done *= 2)
        std::copy_n(length, std::min(done, size - done), length + done);
    std::fill_n(out.segment_begin.data() + segment, size, Length{0});
}

// Writes samples [begin, end) of `columns` to `out`, from `sample` and `segment` on.
template <typename Id, typename Length>
void write_columns(const Samples<Id, Length>& out, const std::vector<Column>& columns,
                   const SortedRests<Id>& sorted, Span<const Length> lengths, std::int64_t begin,
                   std::int64_t end, std::int64_t sample, std::int64_t segment) {
    const auto width = static_cast<std::int64_t>(columns.size());
    const std::int64_t block = samples_in_block(columns);
    TailBegins<Id, Length> tails(out, lengths);
    for (; begin < end; begin += block, sample += block, segment += block * width) {
        const std::int64_t count = std::min(block, end - begin);
        prefetch_columns(columns, sorted, begin + count, std::min(begin + count + block, end));
        for (std::int64_t i = 0; i < count; ++i) out.open_sample(sample + i, segment + i * width);
        write_pattern(out, columns, segment, count);
        std::int64_t at = segment;
        for (const Column& column : columns) {
            const Id* ids = sorted.ids.data() + column.first + begin * column.stride;
            Id* document = out.segment_document.data() + at;
            for (std::int64_t i = 0; i < count; ++i) {
                const Id id = ids[i * column.stride];
                document[i * width] = id;
                if (id >= 0) continue;
                document[i * width] = static_cast<Id>(~id);
                tails.put(at + i * width, static_cast<Id>(~id), column.length);
            }
            ++at;
        }
    }
    tails.finish();
}

}  // namespace megapack
