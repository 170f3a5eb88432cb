// A set of lengths in [0, limit] that finds the largest member <= x in a few instructions: a bit
// per length, a bit per word of those bits, and so on (64-ary tree).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace megapack {

class LengthSet {
  public:
    explicit LengthSet(std::int64_t limit) : limit_(limit) {
        auto bits = static_cast<std::size_t>(limit) + 1;
        do {
            bits = (bits + 63) / 64;
            levels_.emplace_back(bits, 0);
        } while (bits > 1);
    }

    void insert(std::int64_t x) {
        auto i = static_cast<std::size_t>(x);
        for (auto& level : levels_) {
            level[i / 64] |= std::uint64_t{1} << (i % 64);
            i /= 64;
        }
    }
    void erase(std::int64_t x) {
        auto i = static_cast<std::size_t>(x);
        for (auto& level : levels_) {
            level[i / 64] &= ~(std::uint64_t{1} << (i % 64));
            if (level[i / 64] != 0) return;
            i /= 64;
        }
    }
    bool empty() const { return levels_.back()[0] == 0; }

    // Returns the largest member, or -1.
    std::int64_t largest() const { return at_most(limit_); }
    // Returns the largest member <= x, or -1.
    std::int64_t at_most(std::int64_t x) const {
        if (x < 0) return -1;
        x = std::min(x, limit_);
        auto i = static_cast<std::size_t>(x);
        for (std::size_t l = 0; l < levels_.size(); ++l) {
            const std::uint64_t below = levels_[l][i / 64] & (~std::uint64_t{0} >> (63 - i % 64));
            if (below != 0) return highest(l, i / 64 * 64 + 63 - leading_zeros(below));
            if (i / 64 == 0) return -1;
            i = i / 64 - 1;
        }
        return -1;
    }
    // Returns the smallest member >= x, or -1.
    std::int64_t at_least(std::int64_t x) const {
        auto i = static_cast<std::size_t>(x);
        for (std::size_t l = 0; l < levels_.size(); ++l) {
            if (i / 64 >= levels_[l].size()) return -1;
            const std::uint64_t above = levels_[l][i / 64] & (~std::uint64_t{0} << (i % 64));
            if (above != 0) return lowest(l, i / 64 * 64 + trailing_zeros(above));
            i = i / 64 + 1;
        }
        return -1;
    }

  private:
    static std::size_t leading_zeros(std::uint64_t x) {
        return static_cast<std::size_t>(__builtin_clzll(x));
    }
    static std::size_t trailing_zeros(std::uint64_t x) {
        return static_cast<std::size_t>(__builtin_ctzll(x));
    }
    std::int64_t highest(std::size_t level, std::size_t i) const {
        while (level-- > 0) i = i * 64 + 63 - leading_zeros(levels_[level][i]);
        return static_cast<std::int64_t>(i);
    }
    std::int64_t lowest(std::size_t level, std::size_t i) const {
        while (level-- > 0) i = i * 64 + trailing_zeros(levels_[level][i]);
        return static_cast<std::int64_t>(i);
    }

    std::int64_t limit_;
    std::vector<std::vector<std::uint64_t>> levels_;
};

}  // namespace megapack
