// Documents that several ranks share: groups of ranks opened for the longest, filled with the rest.
#pragma once

#include "core/planning/dealing.hpp"

namespace megapack {

// Deals items, longest first, to groups of ranks opened in all micro batches: long ones so that
// ranks have equal attention, short ones so that ranks have equal tokens. Also where ranks are
// nearly full: by sums of lengths that fit exactly. False where one has room nowhere.
bool deal_shared(Dealing& dealing);

// Every item in a micro batch of its own, on as many ranks as hold it.
void deal_apart(Dealing& dealing);

}  // namespace megapack
