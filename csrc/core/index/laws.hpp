// What is true of every packing.
#pragma once

#include "core/index/view.hpp"

namespace megapack {

// Throws FormatError at the first number that breaks a law, whatever the arrays hold: capacities
// and offsets ascend and cover all samples and segments, no sample is empty or exceeds its
// capacity, no segment is empty or leaves its document.
void check_laws(const SampleView& samples, Span<const std::int64_t> capacities,
                const Integers& lengths);

}  // namespace megapack
