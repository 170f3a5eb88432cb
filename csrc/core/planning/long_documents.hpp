// The long documents of a step make the attention: each micro batch gets documents of like length,
// and its ranks as much attention each.
#pragma once

#include <vector>

#include "core/planning/groups.hpp"

namespace megapack {

// Opens groups on all ranks of all micro batches, none of fewer ranks than `least_degree` unless
// no more are left, and deals documents (longest first) to them. Returns those without room.
std::vector<Document> deal_long(Groups& groups, const std::vector<Document>& documents,
                                std::int64_t least_degree);

}  // namespace megapack
