#include "core/packing/next_fit.hpp"

#include "core/packing/sort.hpp"

namespace megapack {
namespace {

template <typename Id, typename Length>
class NextFit {
  public:
    NextFit(const Samples<Id, Length>& out, std::int64_t capacity, std::int64_t sample,
            std::int64_t segment)
        : out_(out), capacity_(capacity), sample_(sample), segment_(segment) {}

    void push(Id document, Length begin, std::int64_t length) {
        if (length > room_) {
            out_.open_sample(sample_++, segment_);
            room_ = capacity_;
        }
        out_.put(segment_++, document, begin, static_cast<std::int32_t>(length));
        room_ -= length;
    }
    std::int64_t num_samples() const { return sample_; }
    std::int64_t num_segments() const { return segment_; }

  private:
    const Samples<Id, Length>& out_;
    std::int64_t capacity_, sample_, segment_, room_ = 0;
};

}  // namespace

template <typename Id, typename Length>
Samples<Id, Length> pack_next_fit(const Documents<Id, Length>& documents, std::int64_t capacity,
                                  const Run& run) {
    check_capacity(capacity);
    const std::size_t n = documents.size(), parts = n / kPartSize + 1;
    run.progress.add_total(static_cast<std::int64_t>(n));
    std::int64_t chunks = 0, rests = 0;
    for (std::size_t i = 0; i < n; ++i) {
        const std::int64_t length = documents[i].length;
        if (length >= capacity) chunks += length / capacity;
        rests += length < capacity ? length > 0 : length % capacity > 0;
    }
    Samples<Id, Length> out({capacity}, {chunks + rests}, chunks + rests);
    NextFit<Id, Length> open(out, capacity, chunks, chunks);
    std::int64_t chunk = 0;
    for (std::size_t p = 0; p < parts; ++p) {
        const Part range = part_of(n, parts, p);
        for (std::size_t i = range.begin; i < range.end; ++i) {
            const Item<Id, Length> item = documents[i];
            std::int64_t begin = 0, left = item.length;
            for (; left >= capacity; begin += capacity, left -= capacity, ++chunk) {
                out.open_sample(chunk, chunk);
                out.put(chunk, item.document, static_cast<Length>(begin),
                        static_cast<std::int32_t>(capacity));
            }
            if (left > 0) open.push(item.document, static_cast<Length>(begin), left);
        }
        run.progress.advance(static_cast<std::int64_t>(range.end - range.begin));
    }
    out.truncate(open.num_samples(), open.num_segments());
    return out;
}

template <typename Id, typename Length>
Samples<Id, Length> pack_length_sorted(const Documents<Id, Length>& documents,
                                       std::int64_t capacity, const Run& run) {
    check_capacity(capacity);
    const auto n = static_cast<std::int64_t>(documents.size());
    run.progress.add_total(2 * n);
    LengthSort<Id, Length> sort(documents, PlainCut{capacity}, run.threads);
    const std::int64_t chunks = sort.num_chunks(), rests = sort.num_rests();
    Samples<Id, Length> out({capacity}, {chunks + rests}, chunks + rests);
    const SortedRests<Id> sorted = sort.sort([&](std::int64_t chunk, Id document, Length begin) {
        out.open_sample(chunk, chunk);
        out.put(chunk, document, begin, static_cast<std::int32_t>(capacity));
    });
    run.progress.advance(n);
    NextFit<Id, Length> open(out, capacity, chunks, chunks);
    std::size_t at = 0;
    for (std::size_t l = 1; l < sort.counts().size(); ++l) {
        const auto length = static_cast<std::int64_t>(l);
        for (std::int64_t k = 0; k < sort.counts()[l]; ++k) {
            const Rest<Id, Length> rest(sorted.ids[at++], length, documents.lengths);
            open.push(rest.document, rest.begin, length);
        }
    }
    out.truncate(open.num_samples(), open.num_segments());
    run.progress.advance(n);
    return out;
}

#define MEGAPACK_INSTANTIATE(Id, Length)                                                        \
    template Samples<Id, Length> pack_next_fit(const Documents<Id, Length>&, std::int64_t,      \
                                               const Run&);                                     \
    template Samples<Id, Length> pack_length_sorted(const Documents<Id, Length>&, std::int64_t, \
                                                    const Run&);
MEGAPACK_FOR_EACH_WIDTH(MEGAPACK_INSTANTIATE)

}  // namespace megapack
