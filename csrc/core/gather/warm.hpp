// Memory-mapped arrays into the page cache before they are looked up at random.
#pragma once

#include <cstdint>

#include "core/base/span.hpp"

namespace megapack {

// Asks the kernel to read these bytes ahead. Advice: for memory that is no mapping it does nothing.
void will_need(Span<const std::uint8_t> bytes);

}  // namespace megapack
