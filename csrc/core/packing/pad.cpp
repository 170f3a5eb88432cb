#include "core/packing/pad.hpp"

#include <algorithm>

namespace megapack {
namespace {

// Every document cut in units, one sample each, in the order of documents.
template <typename Id, typename Length>
Samples<Id, Length> cut_in_units(const Documents<Id, Length>& documents, std::int64_t unit,
                                 const Run& run) {
    const std::int64_t n = documents.size();
    run.progress.add_total(2 * n);
    std::vector<std::int64_t> next(num_parts(n), 0);
    for_each_part(run, n, [&](std::int64_t p, Part range) {
        for (std::int64_t i = range.begin; i < range.end; ++i)
            next[p] += (documents[i].length + unit - 1) / unit;
    });
    const std::int64_t units = lay_out(next);
    Samples<Id, Length> out({unit}, {units}, units);
    for_each_part(run, n, [&](std::int64_t p, Part range) {
        for (std::int64_t i = range.begin; i < range.end; ++i) {
            const Item<Id, Length> item = documents[i];
            for (std::int64_t begin = 0; begin < item.length; begin += unit, ++next[p]) {
                const std::int64_t left = item.length - begin;
                out.open_sample(next[p], next[p]);
                out.put(next[p], item.document, static_cast<Length>(begin),
                        static_cast<std::int32_t>(std::min(left, unit)));
            }
        }
    });
    return out;
}

}  // namespace

template <typename Id, typename Length>
Samples<Id, Length> pack_pad(const Lengths<Length>& lengths, const PadRules& rules,
                             const Run& run) {
    const AtomSize& sizes = rules.sizes;
    sizes.check_sizes();
    const Documents<Id, Length> documents = in_file_order<Id>(lengths);
    Samples<Id, Length> units = cut_in_units(documents, sizes.unit(), run);
    if (sizes.atom_size == sizes.capacity) return units;
    std::vector<std::int32_t> units_of;
    if (sizes.atom_size < sizes.capacity) {
        units_of.assign(units.num_samples(), 1);
    } else {
        for (std::int64_t i = 0; i < documents.size(); ++i)
            for (std::int64_t left = documents[i].length; left > 0; left -= sizes.atom_size) {
                const std::int64_t tokens = std::min(left, sizes.atom_size);
                units_of.push_back(
                    static_cast<std::int32_t>((tokens + sizes.capacity - 1) / sizes.capacity));
            }
    }
    return reorder_atoms(units, units_of, ssize(units_of), sizes, run);
}

MEGAPACK_INSTANTIATE_STRATEGY(pack_pad, PadRules);

}  // namespace megapack
