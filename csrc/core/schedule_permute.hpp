// A shuffle that can be asked for any position: nothing of the size of the data is stored.
#pragma once

#include <cstdint>

#include "core/span.hpp"

namespace megapack {

// A bijection of [0, size) chosen by the key: an alternating Feistel network on the bits of
// size - 1, applied again while the result lies outside [0, size) (cycle walking, Black and
// Rogaway: Ciphers with Arbitrary Finite Domains, CT-RSA 2002). Fewer than two applications on
// average.
class Permutation {
  public:
    Permutation(std::uint64_t key, std::int64_t size);

    std::int64_t operator()(std::int64_t position) const;

  private:
    std::uint64_t encrypt(std::uint64_t x) const;

    std::uint64_t size_;
    int right_bits_ = 0;
    std::uint64_t left_mask_ = 0;
    std::uint64_t right_mask_ = 0;
    static constexpr int kRounds = 4;
    std::uint64_t round_keys_[2 * kRounds];
};

// out[i] = permutation(first + i).
void permute_range(std::uint64_t key, std::int64_t size, std::int64_t first,
                   Span<std::int64_t> out);

}  // namespace megapack
