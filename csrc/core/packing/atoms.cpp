#include "core/packing/atoms.hpp"

#include <limits>
#include <numeric>

#include "core/packing/order.hpp"

namespace megapack {

void AtomSize::check_sizes() const {
    check_capacity(capacity);
    constexpr std::int64_t kLimit = std::numeric_limits<std::int32_t>::max();
    check(atom_size >= 1 && atom_size <= kLimit, "atom_size is ", atom_size,
          "; it must be from 1 to ", kLimit);
    check(capacity % atom_size == 0 || atom_size % capacity == 0, "atom_size is ", atom_size,
          " and the capacity ", capacity, "; one must be a multiple of the other");
}

template <typename Id, typename Length>
Samples<Id, Length> reorder_atoms(const Samples<Id, Length>& units,
                                  const std::vector<std::int32_t>& units_of,
                                  std::int64_t num_shuffled, const AtomSize& sizes,
                                  const Run& run) {
    const Span<const std::int32_t> shuffled{units_of.data(), num_shuffled};
    const auto order =
        shuffle<std::int64_t>(shuffled, random_for(run.seed, Purpose::kAtoms), run.threads);
    std::vector<std::int64_t> first_unit(units_of.begin(), units_of.end());
    lay_out(first_unit);

    const std::int64_t merge = sizes.capacity / sizes.unit(), count = units.num_samples();
    Samples<Id, Length> out({sizes.capacity}, {(count + merge - 1) / merge},
                            units.segment_length.size());
    std::int64_t unit = 0, at = 0;
    for (std::int64_t a = 0; a < ssize(units_of); ++a) {
        const std::int64_t atom = a < num_shuffled ? order[a].document : a;
        const std::int64_t first = first_unit[atom];
        for (std::int64_t u = first; u < first + units_of[atom]; ++u) {
            if (unit % merge == 0) out.open_sample(unit / merge, at);
            ++unit;
            const std::int64_t end = units.sample_segment_offsets[u + 1];
            for (std::int64_t s = units.sample_segment_offsets[u]; s < end; ++s)
                out.put(at++, units.segment_document[s], units.segment_begin[s],
                        units.segment_length[s]);
        }
    }
    return out;
}

#define MEGAPACK_INSTANTIATE(Id, Length)                                                       \
    template Samples<Id, Length> reorder_atoms(const Samples<Id, Length>&,                     \
                                               const std::vector<std::int32_t>&, std::int64_t, \
                                               const AtomSize&, const Run&);
MEGAPACK_FOR_EACH_WIDTH(MEGAPACK_INSTANTIATE)

}  // namespace megapack
