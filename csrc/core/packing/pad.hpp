// pad: a document per sample, the rest padding. Atoms are pieces of documents, and a piece shorter
// than its unit is followed by padding (all padding of a sample stands at its end, as everywhere).
#pragma once

#include "core/packing/atoms.hpp"
#include "core/packing/strategy.hpp"

namespace megapack {

struct PadRules {
    AtomSize sizes;
};

template <typename Id, typename Length>
Samples<Id, Length> pack_pad(const Lengths<Length>& lengths, const PadRules& rules, const Run& run);

}  // namespace megapack
