#include "core/schedule_permute.hpp"

#include "core/check.hpp"
#include "core/schedule_random.hpp"

namespace megapack {

Permutation::Permutation(std::uint64_t key, std::int64_t size)
    : size_(static_cast<std::uint64_t>(size)) {
    check(size > 0, "a permutation of ", size, " elements; it needs at least 1");
    int bits = 0;
    while (bits < 63 && ((size_ - 1) >> bits) != 0) ++bits;
    right_bits_ = bits - bits / 2;
    left_mask_ = (1ULL << (bits / 2)) - 1;
    right_mask_ = (1ULL << right_bits_) - 1;
    for (int i = 0; i < 2 * kRounds; ++i) {
        round_keys_[i] = random_bits(key, static_cast<std::uint64_t>(i));
    }
}

std::uint64_t Permutation::encrypt(std::uint64_t x) const {
    std::uint64_t left = x >> right_bits_;
    std::uint64_t right = x & right_mask_;
    for (int i = 0; i < 2 * kRounds; i += 2) {
        right = (right ^ mix64(left ^ round_keys_[i])) & right_mask_;
        left = (left ^ mix64(right ^ round_keys_[i + 1])) & left_mask_;
    }
    return (left << right_bits_) | right;
}

std::int64_t Permutation::operator()(std::int64_t position) const {
    auto x = static_cast<std::uint64_t>(position);
    do {
        x = encrypt(x);
    } while (x >= size_);
    return static_cast<std::int64_t>(x);
}

void permute_range(std::uint64_t key, std::int64_t size, std::int64_t first,
                   Span<std::int64_t> out) {
    const Permutation permutation(key, size);
    const auto count = static_cast<std::int64_t>(out.size());
    check(first >= 0 && count <= size && first <= size - count, "positions [", first, ", +", count,
          ") of a permutation of ", size);
    for (std::int64_t i = 0; i < count; ++i) {
        out[static_cast<std::size_t>(i)] = permutation(first + i);
    }
}

}  // namespace megapack
