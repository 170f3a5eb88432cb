// next_fit and length_sorted: full chunks are samples of their own; a rest that does not fit in the
// open sample closes it and opens the next.
#pragma once

#include "core/packing/types.hpp"

namespace megapack {

// Rests in the order of `documents`.
template <typename Id, typename Length>
Samples<Id, Length> pack_next_fit(const Documents<Id, Length>& documents, std::int64_t capacity,
                                  const Run& run);

// Rests from short to long, equal lengths in the order of `documents`.
template <typename Id, typename Length>
Samples<Id, Length> pack_length_sorted(const Documents<Id, Length>& documents,
                                       std::int64_t capacity, const Run& run);

}  // namespace megapack
