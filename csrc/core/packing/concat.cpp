#include "core/packing/concat.hpp"

#include "core/packing/order.hpp"
#include "core/packing/stream.hpp"

namespace megapack {
namespace {

// `stream`: the stream of all documents cut in units.
template <typename Id, typename Length>
Samples<Id, Length> shuffle_atoms(const Samples<Id, Length>& stream, const AtomSize& sizes,
                                  const Run& run) {
    const std::int64_t per_atom = sizes.atom_size / sizes.unit();
    std::int64_t tokens = 0;
    for (const std::int32_t length : Span<const std::int32_t>(stream.segment_length))
        tokens += length;
    const std::int64_t full = tokens / sizes.atom_size;
    std::vector<std::int32_t> units(full, static_cast<std::int32_t>(per_atom));
    const std::int64_t rest = stream.num_samples() - full * per_atom;
    if (rest > 0) units.push_back(static_cast<std::int32_t>(rest));
    return reorder_atoms(stream, units, full, sizes, run);
}

}  // namespace

template <typename Id, typename Length>
Samples<Id, Length> pack_concat(const Lengths<Length>& lengths, const ConcatRules& rules,
                                const Run& run) {
    const AtomSize& sizes = rules.sizes;
    sizes.check_sizes();
    return pack_in_order<Id>(lengths, rules.shuffle, run, [&](const auto& documents) {
        auto samples = pack_streams(documents, {sizes.unit()}, run);
        if (sizes.atom_size != sizes.capacity) samples = shuffle_atoms(samples, sizes, run);
        if (rules.drop_last) drop_partial_sample(samples);
        return samples;
    });
}

MEGAPACK_INSTANTIATE_STRATEGY(pack_concat, ConcatRules);

}  // namespace megapack
