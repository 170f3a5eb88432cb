#include "core/packing/next_fit.hpp"

#include "core/packing/order.hpp"

namespace megapack {
namespace {

template <typename Id, typename Length>
Samples<Id, Length> pack_documents(const Documents<Id, Length>& documents, std::int64_t capacity,
                                   const Run& run) {
    const std::int64_t n = documents.size();
    run.progress.add_total(n);
    std::int64_t chunks = 0, rests = 0;
    for (std::int64_t i = 0; i < n; ++i) {
        const std::int64_t length = documents[i].length;
        if (length >= capacity) chunks += length / capacity;
        rests += length < capacity ? length > 0 : length % capacity > 0;
    }
    Samples<Id, Length> out({capacity}, {chunks + rests}, chunks + rests);
    NextFit<Id, Length> open(out, capacity, chunks, chunks);
    std::int64_t chunk = 0;
    // Each sample depends on the one before: on one thread, whatever the run has.
    for_each_part(Run(run.seed, 1, run.progress), n, [&](std::int64_t, Part range) {
        for (std::int64_t i = range.begin; i < range.end; ++i) {
            const Item<Id, Length> item = documents[i];
            std::int64_t begin = 0, left = item.length;
            for (; left >= capacity; begin += capacity, left -= capacity, ++chunk) {
                out.open_sample(chunk, chunk);
                out.put(chunk, item.document, static_cast<Length>(begin),
                        static_cast<std::int32_t>(capacity));
            }
            if (left > 0) open.push(item.document, static_cast<Length>(begin), left);
        }
    });
    out.truncate(open.num_samples(), open.num_segments());
    return out;
}

}  // namespace

template <typename Id, typename Length>
Samples<Id, Length> pack_next_fit(const Lengths<Length>& lengths, const NextFitRules& rules,
                                  const Run& run) {
    check_capacity(rules.capacity);
    return pack_in_order<Id>(lengths, rules.shuffle, run, [&](const auto& documents) {
        return pack_documents(documents, rules.capacity, run);
    });
}

MEGAPACK_INSTANTIATE_STRATEGY(pack_next_fit, NextFitRules);

}  // namespace megapack
