#include "core/packing/fit_decreasing.hpp"

namespace megapack {

void check_extra_capacity(std::int64_t extra_capacity) {
    check(extra_capacity >= 0 && extra_capacity <= kMaxCapacity, "extra_capacity is ",
          extra_capacity, " tokens; it must be from 0 to ", kMaxCapacity);
}

template <typename Id, typename Length>
Samples<Id, Length> pack_fit(const Documents<Id, Length>& documents, std::int64_t capacity,
                             std::int64_t extra_capacity, Fit fit, const Run& run) {
    check_capacity(capacity);
    check_extra_capacity(extra_capacity);
    const auto n = static_cast<std::int64_t>(documents.size());
    run.progress.add_total(3 * n);
    LengthSort<Id, Length> sort(documents, PlainCut{capacity}, run.threads);
    const FitPlan plan = plan_fit(sort.counts(), capacity + extra_capacity, fit);
    run.progress.advance(n);

    const std::int64_t chunks = sort.num_chunks();
    // Every rest is one segment at most; fewer where extra_capacity drops some.
    Samples<Id, Length> out({capacity}, {chunks + plan.num_bins()}, chunks + sort.num_rests());
    const SortedRests<Id> sorted = sort.sort([&](std::int64_t chunk, Id document, Length begin) {
        out.open_sample(chunk, chunk);
        out.put(chunk, document, begin, static_cast<std::int32_t>(capacity));
    });
    run.progress.advance(n);
    const BinWriter<Id, Length> writer(plan, plan.runs, sorted, documents.lengths, capacity);
    writer.write(out, chunks, chunks, run.threads);
    out.truncate(out.num_samples(), chunks + writer.num_segments());
    out.dropped_tokens = writer.lost_tokens();
    run.progress.advance(n);
    return out;
}

#define MEGAPACK_INSTANTIATE(Id, Length)                                              \
    template Samples<Id, Length> pack_fit(const Documents<Id, Length>&, std::int64_t, \
                                          std::int64_t, Fit, const Run&);
MEGAPACK_FOR_EACH_WIDTH(MEGAPACK_INSTANTIATE)

}  // namespace megapack
