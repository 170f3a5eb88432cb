// Random numbers of the strategies: SplitMix64 as a counter-based generator (Steele, Lea, Flood,
// "Fast splittable pseudorandom number generators", OOPSLA 2014). Word i of a key is a pure
// function of (key, i), so any thread can compute any part of a shuffle.
//
//     word(i)     = mix(key + (i + 1) * 0x9E3779B97F4A7C15)         (64-bit arithmetic, wrapping)
//     mix(z)      : z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9
//                   z = (z ^ z >> 27) * 0x94D049BB133111EB
//                   z ^ z >> 31
//     below(i, n) = floor(word(i) * n / 2^64)
//     child(i)    = the generator whose key is word(i)
//
// The seed is the key of the root generator, which has one child per `Purpose`.
// tests/reference/random.py defines the same in Python.
#pragma once

#include <cstdint>

namespace megapack {

class Random {
  public:
    explicit constexpr Random(std::uint64_t key) : key_(key) {}

    constexpr std::uint64_t word(std::uint64_t i) const {
        std::uint64_t z = key_ + (i + 1) * 0x9E3779B97F4A7C15u;
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
        return z ^ (z >> 31);
    }
    constexpr std::uint64_t below(std::uint64_t i, std::uint64_t n) const {
        __extension__ using Wide = unsigned __int128;
        return static_cast<std::uint64_t>((static_cast<Wide>(word(i)) * n) >> 64);
    }
    constexpr Random child(std::uint64_t i) const { return Random(word(i)); }

  private:
    std::uint64_t key_;
};

// Number of a child of the root generator: one for each random decision of a strategy.
enum class Purpose : std::uint64_t { kDocuments = 0, kAtoms = 1, kSegments = 2, kPools = 3 };

inline constexpr Random random_for(std::uint64_t seed, Purpose purpose) {
    return Random(seed).child(static_cast<std::uint64_t>(purpose));
}

}  // namespace megapack
