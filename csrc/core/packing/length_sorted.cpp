#include "core/packing/length_sorted.hpp"

#include "core/packing/next_fit.hpp"
#include "core/packing/sort.hpp"

namespace megapack {

template <typename Id, typename Length>
Samples<Id, Length> pack_length_sorted(const Lengths<Length>& lengths,
                                       const LengthSortedRules& rules, const Run& run) {
    const std::int64_t capacity = rules.capacity;
    check_capacity(capacity);
    const Documents<Id, Length> documents = in_file_order<Id>(lengths);
    run.progress.add_total(2 * documents.size());
    LengthSort<Id, Length> sort(documents, PlainCut{capacity}, run.threads);
    const std::int64_t chunks = sort.num_chunks(), rests = sort.num_rests();
    Samples<Id, Length> out({capacity}, {chunks + rests}, chunks + rests);
    const SortedRests<Id> sorted = sort.sort([&](std::int64_t chunk, Id document, Length begin) {
        out.open_sample(chunk, chunk);
        out.put(chunk, document, begin, static_cast<std::int32_t>(capacity));
    });
    run.progress.advance(documents.size());
    NextFit<Id, Length> open(out, capacity, chunks, chunks);
    std::int64_t at = 0;
    for (std::int64_t length = 1; length < ssize(sort.counts()); ++length) {
        for (std::int64_t k = 0; k < sort.counts()[length]; ++k) {
            const Rest<Id, Length> rest(sorted.ids[at++], length, documents.lengths);
            open.push(rest.document, rest.begin, length);
        }
    }
    out.truncate(open.num_samples(), open.num_segments());
    run.progress.advance(documents.size());
    return out;
}

MEGAPACK_INSTANTIATE_STRATEGY(pack_length_sorted, LengthSortedRules);

}  // namespace megapack
