// The short documents of a step fill every rank of every micro batch to the same number of tokens.
#pragma once

#include <vector>

#include "core/planning/groups.hpp"

namespace megapack {

// Deals documents (longest first); false where one has no room.
bool deal_short(Groups& groups, const std::vector<Document>& documents);

}  // namespace megapack
