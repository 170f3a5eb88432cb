// concat: documents joined to one stream that is cut every capacity tokens (concatenate-and-chunk).
#pragma once

#include "core/packing/atoms.hpp"
#include "core/packing/strategy.hpp"

namespace megapack {

struct ConcatRules {
    AtomSize sizes;          // atoms: full ones are shuffled, a partial one stays last
    bool shuffle = false;    // the documents are joined in seeded order (Purpose::kDocuments)
    bool drop_last = false;  // a last sample that is not full counts as dropped
};

template <typename Id, typename Length>
Samples<Id, Length> pack_concat(const Lengths<Length>& lengths, const ConcatRules& rules,
                                const Run& run);

}  // namespace megapack
