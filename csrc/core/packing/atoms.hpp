// Atom sizes (Chen et al. 2024, A.3): the corpus is cut in atoms of `atom_size` tokens, which are
// shuffled and then merged (atom_size < capacity) or split (atom_size > capacity) to samples.
//
// One of atom_size and capacity divides the other. A *unit* is the smaller of the two: an atom is
// one unit or several, a sample too. With atom_size equal to capacity atoms are samples; nothing is
// shuffled then, since the order of samples belongs to the schedule.
#pragma once

#include <vector>

#include "core/packing/run.hpp"
#include "core/packing/samples.hpp"

namespace megapack {

struct AtomSize {
    std::int64_t capacity, atom_size;

    std::int64_t unit() const { return atom_size < capacity ? atom_size : capacity; }
    void check_sizes() const;  // throws std::invalid_argument
};

// Units, a sample each, in atoms of units_of[a] units; the first `num_shuffled` atoms in seeded
// order (Purpose::kAtoms). They become samples of the capacity.
template <typename Id, typename Length>
Samples<Id, Length> reorder_atoms(const Samples<Id, Length>& units,
                                  const std::vector<std::int32_t>& units_of,
                                  std::int64_t num_shuffled, const AtomSize& sizes, const Run& run);

}  // namespace megapack
