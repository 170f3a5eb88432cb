#include "core/packing/fit_decreasing.hpp"

#include "core/packing/bins.hpp"

namespace megapack {

template <typename Id, typename Length>
Samples<Id, Length> pack_fit_decreasing(const Lengths<Length>& lengths, const FitRules& rules,
                                        const Run& run) {
    const std::int64_t capacity = rules.capacity, n = lengths.size();
    check_capacity(capacity);
    check_extra_capacity(rules.extra_capacity);
    run.progress.add_total(3 * n);
    LengthSort<Id, Length> sort(in_file_order<Id>(lengths), PlainCut{capacity}, run.threads);
    const FitPlan plan = plan_fit(sort.counts(), capacity + rules.extra_capacity, rules.fit);
    run.progress.advance(n);

    const std::int64_t chunks = sort.num_chunks();
    // Every rest is one segment at most; fewer where extra_capacity drops some.
    Samples<Id, Length> out({capacity}, {chunks + plan.num_bins()}, chunks + sort.num_rests());
    const SortedRests<Id> sorted = sort.sort([&](std::int64_t chunk, Id document, Length begin) {
        out.open_sample(chunk, chunk);
        out.put(chunk, document, begin, static_cast<std::int32_t>(capacity));
    });
    run.progress.advance(n);
    const BinWriter<Id, Length> writer(plan, plan.runs, sorted, lengths, capacity);
    writer.write(out, chunks, chunks, run.threads);
    out.truncate(out.num_samples(), chunks + writer.num_segments());
    out.dropped_tokens = writer.lost_tokens();
    run.progress.advance(n);
    return out;
}

MEGAPACK_INSTANTIATE_STRATEGY(pack_fit_decreasing, FitRules);

}  // namespace megapack
