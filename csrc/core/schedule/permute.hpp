// Permutations; any part is computed without storing the whole.
//
//     permute_range(key, 1000000, 5, out)  ->  out = elements 5, 6, ... of a shuffled [0, 1000000)
#pragma once

#include <cstdint>

#include "core/base/span.hpp"

namespace megapack {

// out[i] = permutation(first + i), a bijection of [0, size) that depends on the key.
//
// Small sizes are shuffled (Fisher and Yates): every order is equally likely. Larger ones use an
// alternating Feistel network on the bits of size - 1, applied again while the result is outside
// [0, size) (cycle walking, Black and Rogaway: Ciphers with Arbitrary Finite Domains, CT-RSA 2002);
// on average less than two applications.
void permute_range(std::uint64_t key, std::int64_t size, std::int64_t first,
                   Span<std::int64_t> out);

// Inverts the permutation: permutation(out[i]) == values[i].
void permute_inverse(std::uint64_t key, std::int64_t size, Span<const std::int64_t> values,
                     Span<std::int64_t> out);

// Positions [begin, begin + count) of an endless sequence of epochs of [0, size); epoch e is
// permuted with random_bits(key, e).
struct EpochRun {
    std::uint64_t key;
    std::int64_t size;
    std::int64_t begin;
    std::int64_t count;
};
// Writes the runs one after the other; without `shuffled`, every epoch is 0, 1, 2, ...
void permute_epochs(Span<const EpochRun> runs, bool shuffled, Span<std::int64_t> out);

}  // namespace megapack
