// Items exchanged between bins until ranks have equal work.
#pragma once

#include <cstdint>

#include "core/planning/dealing.hpp"

namespace megapack {

// Makes small, by exchanging items as long as that pays, at most so many exchanges being looked at,
// what ranks wait for each other: of every kind of cost its path (`Balance`), and of the paths the
// longest. Then, the paths being as they are, the busiest rank of the step. Returns a number that
// is smaller for a better arrangement of the same items.
std::int64_t balance(Dealing& dealing, std::int64_t looks);

}  // namespace megapack
