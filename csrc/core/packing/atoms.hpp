// Atom sizes (Chen et al. 2024, A.3): the corpus is cut in atoms of `atom_size` tokens, which are
// shuffled and then merged (atom_size < capacity) or split (atom_size > capacity) to samples.
//
// One of atom_size and capacity divides the other. A *unit* is the smaller of the two: an atom is
// one unit or several, a sample too. With atom_size equal to capacity atoms are samples; nothing is
// shuffled then, since the order of samples belongs to the schedule.
#pragma once

#include "core/packing/types.hpp"

namespace megapack {

struct AtomRules {
    std::int64_t capacity, atom_size;

    std::int64_t unit() const { return atom_size < capacity ? atom_size : capacity; }
    void check_sizes() const;  // throws std::invalid_argument
};

// `pad`: atoms are pieces of documents, and a piece shorter than its unit is followed by padding
// (all padding of a sample stands at its end, as everywhere).
template <typename Id, typename Length>
Samples<Id, Length> pack_padded(const Documents<Id, Length>& documents, const AtomRules& rules,
                                const Run& run);

// `concat` with atoms: `stream` is the stream of all documents cut in units. Full atoms are
// shuffled; a partial one stays last.
template <typename Id, typename Length>
Samples<Id, Length> shuffle_atoms(const Samples<Id, Length>& stream, const AtomRules& rules,
                                  const Run& run);

}  // namespace megapack
