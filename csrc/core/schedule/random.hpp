// Counter-based random numbers of the schedule: a number is a function of (key, counter), so any
// step of a run is computed without the steps before it.
#pragma once

#include <cstdint>

namespace megapack {

// The finalizer of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators,
// OOPSLA 2014), a bijection of 64 bits in which every input bit reaches every output bit.
inline std::uint64_t mix64(std::uint64_t x) {
    x += 0x9E3779B97F4A7C15ULL;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
    return x ^ (x >> 31);
}

inline std::uint64_t random_bits(std::uint64_t key, std::uint64_t counter) {
    return mix64(key ^ mix64(counter));
}

// Uniform in [0, 1), a multiple of 2^-53.
inline double random_unit(std::uint64_t key, std::uint64_t counter) {
    return static_cast<double>(random_bits(key, counter) >> 11) * 0x1p-53;
}

}  // namespace megapack
