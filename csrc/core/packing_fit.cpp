#include "core/packing_fit.hpp"

namespace megapack {

template <typename Id, typename Length>
Samples<Id, Length> pack_fit(const Documents<Id, Length>& documents, std::int64_t capacity,
                             std::int64_t extra_capacity, Fit fit, int threads,
                             Progress& progress) {
    const auto n = static_cast<std::int64_t>(documents.size());
    progress.add_total(3 * n);
    LengthSort<Id, Length> sort(documents, PlainCut{capacity}, threads);
    const FitPlan plan = plan_fit(sort.counts(), capacity + extra_capacity, fit);
    progress.advance(n);

    const std::int64_t chunks = sort.num_chunks();
    // Every rest is one segment at most; fewer where extra_capacity drops some.
    Samples<Id, Length> out({capacity}, {chunks + plan.num_bins()}, chunks + sort.num_rests());
    const SortedRests<Id> sorted = sort.sort([&](std::int64_t chunk, Id document, Length begin) {
        out.open_sample(chunk, chunk);
        out.put(chunk, document, begin, static_cast<std::int32_t>(capacity));
    });
    progress.advance(n);
    const BinWriter<Id, Length> writer(plan, plan.runs, sorted, documents.lengths, capacity);
    writer.write(out, chunks, chunks, threads);
    out.truncate(out.num_samples(), chunks + writer.num_segments());
    out.dropped_tokens = writer.lost_tokens();
    progress.advance(n);
    return out;
}

#define MEGAPACK_INSTANTIATE(Id, Length)                                              \
    template Samples<Id, Length> pack_fit(const Documents<Id, Length>&, std::int64_t, \
                                          std::int64_t, Fit, int, Progress&);
MEGAPACK_FOR_EACH_WIDTH(MEGAPACK_INSTANTIATE)

}  // namespace megapack
