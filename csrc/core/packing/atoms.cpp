#include "core/packing/atoms.hpp"

#include <limits>
#include <numeric>
#include <utility>

#include "core/packing/order.hpp"

namespace megapack {

void AtomRules::check_sizes() const {
    check_capacity(capacity);
    constexpr std::int64_t kLimit = std::numeric_limits<std::int32_t>::max();
    check(atom_size >= 1 && atom_size <= kLimit, "atom_size is ", atom_size,
          "; it must be from 1 to ", kLimit);
    check(capacity % atom_size == 0 || atom_size % capacity == 0, "atom_size is ", atom_size,
          " and the capacity ", capacity, "; one must be a multiple of the other");
}

namespace {

// Every document cut in units, one sample each, in the order of documents.
template <typename Id, typename Length>
Samples<Id, Length> cut_in_units(const Documents<Id, Length>& documents, std::int64_t unit,
                                 const Run& run) {
    const std::size_t n = documents.size(), parts = (n + kPartSize - 1) / kPartSize;
    std::vector<std::int64_t> next(parts, 0);
    parallel_for(run.threads, parts, [&](std::size_t p) {
        const Part range = part_of(n, parts, p);
        for (std::size_t i = range.begin; i < range.end; ++i)
            next[p] += (documents[i].length + unit - 1) / unit;
        run.progress.advance(static_cast<std::int64_t>(range.end - range.begin));
    });
    std::int64_t units = 0;
    for (std::int64_t& count : next) units += std::exchange(count, units);
    Samples<Id, Length> out({unit}, {units}, units);
    parallel_for(run.threads, parts, [&](std::size_t p) {
        const Part range = part_of(n, parts, p);
        for (std::size_t i = range.begin; i < range.end; ++i) {
            const Item<Id, Length> item = documents[i];
            for (std::int64_t begin = 0; begin < item.length; begin += unit, ++next[p]) {
                const std::int64_t left = item.length - begin;
                out.open_sample(next[p], next[p]);
                out.put(next[p], item.document, static_cast<Length>(begin),
                        static_cast<std::int32_t>(left < unit ? left : unit));
            }
        }
        run.progress.advance(static_cast<std::int64_t>(range.end - range.begin));
    });
    return out;
}

// Units, in atoms of sizes[a] units each, in a seeded order of the first `num_shuffled` atoms;
// `merge` units become a sample.
template <typename Id, typename Length>
Samples<Id, Length> reorder(const Samples<Id, Length>& units,
                            const std::vector<std::int32_t>& sizes, std::size_t num_shuffled,
                            const AtomRules& rules, const Run& run) {
    const Span<const std::int32_t> shuffled{sizes.data(), num_shuffled};
    const auto order =
        shuffle<std::int64_t>(shuffled, random_for(run.seed, Purpose::kAtoms), run.threads);
    std::vector<std::int64_t> first_unit(sizes.size(), 0);
    std::exclusive_scan(sizes.begin(), sizes.end(), first_unit.begin(), std::int64_t{0});

    const std::int64_t merge = rules.capacity / rules.unit(), count = units.num_samples();
    const auto segments = static_cast<std::int64_t>(units.segment_length.size());
    Samples<Id, Length> out({rules.capacity}, {(count + merge - 1) / merge}, segments);
    std::int64_t unit = 0, at = 0;
    for (std::size_t a = 0; a < sizes.size(); ++a) {
        const auto atom = a < num_shuffled ? static_cast<std::size_t>(order[a].document) : a;
        const auto first = static_cast<std::size_t>(first_unit[atom]);
        for (std::size_t u = first; u < first + static_cast<std::size_t>(sizes[atom]); ++u) {
            if (unit % merge == 0) out.open_sample(unit / merge, at);
            ++unit;
            const auto begin = static_cast<std::size_t>(units.sample_segment_offsets[u]);
            const auto end = static_cast<std::size_t>(units.sample_segment_offsets[u + 1]);
            for (std::size_t s = begin; s < end; ++s)
                out.put(at++, units.segment_document[s], units.segment_begin[s],
                        units.segment_length[s]);
        }
    }
    return out;
}

}  // namespace

template <typename Id, typename Length>
Samples<Id, Length> pack_padded(const Documents<Id, Length>& documents, const AtomRules& rules,
                                const Run& run) {
    rules.check_sizes();
    run.progress.add_total(2 * static_cast<std::int64_t>(documents.size()));
    Samples<Id, Length> units = cut_in_units(documents, rules.unit(), run);
    if (rules.atom_size == rules.capacity) return units;
    std::vector<std::int32_t> sizes;
    if (rules.atom_size < rules.capacity) {
        sizes.assign(static_cast<std::size_t>(units.num_samples()), 1);
    } else {
        for (std::size_t i = 0; i < documents.size(); ++i)
            for (std::int64_t left = documents[i].length; left > 0; left -= rules.atom_size) {
                const std::int64_t tokens = left < rules.atom_size ? left : rules.atom_size;
                sizes.push_back(
                    static_cast<std::int32_t>((tokens + rules.capacity - 1) / rules.capacity));
            }
    }
    return reorder(units, sizes, sizes.size(), rules, run);
}

template <typename Id, typename Length>
Samples<Id, Length> shuffle_atoms(const Samples<Id, Length>& stream, const AtomRules& rules,
                                  const Run& run) {
    rules.check_sizes();
    const std::int64_t per_atom = rules.atom_size / rules.unit();
    std::int64_t tokens = 0;
    for (const std::int32_t length : Span<const std::int32_t>(stream.segment_length))
        tokens += length;
    const std::int64_t full = tokens / rules.atom_size;
    std::vector<std::int32_t> sizes(static_cast<std::size_t>(full),
                                    static_cast<std::int32_t>(per_atom));
    const std::int64_t rest = stream.num_samples() - full * per_atom;
    if (rest > 0) sizes.push_back(static_cast<std::int32_t>(rest));
    return reorder(stream, sizes, static_cast<std::size_t>(full), rules, run);
}

#define MEGAPACK_INSTANTIATE(Id, Length)                                                     \
    template Samples<Id, Length> pack_padded(const Documents<Id, Length>&, const AtomRules&, \
                                             const Run&);                                    \
    template Samples<Id, Length> shuffle_atoms(const Samples<Id, Length>&, const AtomRules&, \
                                               const Run&);
MEGAPACK_FOR_EACH_WIDTH(MEGAPACK_INSTANTIATE)

}  // namespace megapack
