// A shuffle that can be asked for any position: nothing of the size of the data is stored.
#pragma once

#include <cstdint>

#include "core/base/span.hpp"

namespace megapack {

// out[i] = permutation(first + i), for a bijection of [0, size) that the key chooses.
//
// Small sizes are shuffled (Fisher and Yates), which gives every order the same chance. Larger ones
// use an alternating Feistel network on the bits of size - 1, applied again while the result lies
// outside [0, size) (cycle walking, Black and Rogaway: Ciphers with Arbitrary Finite Domains,
// CT-RSA 2002), fewer than two applications on average.
void permute_range(std::uint64_t key, std::int64_t size, std::int64_t first,
                   Span<std::int64_t> out);

// Where values stand: out[i] is the position with permutation(out[i]) == values[i].
void permute_inverse(std::uint64_t key, std::int64_t size, Span<const std::int64_t> values,
                     Span<std::int64_t> out);

// The elements of a list, again and again, every time in a new order: positions [begin, begin +
// count) of that endless sequence, in which epoch e is permuted by random_bits(key, e).
struct EpochRun {
    std::uint64_t key;
    std::int64_t size;   // of the list
    std::int64_t begin;  // position in the endless sequence
    std::int64_t count;
};
// Writes the runs one after the other; without `shuffled` every epoch is in order.
void permute_epochs(Span<const EpochRun> runs, bool shuffled, Span<std::int64_t> out);

}  // namespace megapack
