// An exact share from 0 to 1 and exact comparisons: Ratio(1, 10).floor_of(1000) is 100, while no
// binary floating point number equals 0.1.
#pragma once

#include <cstdint>

#include "core/base/check.hpp"

namespace megapack {

__extension__ using Wide = __int128;

// numerator / denominator. Multiply it only by numbers below 2^62.
class Ratio {
  public:
    constexpr Ratio() = default;
    Ratio(std::int64_t numerator, std::int64_t denominator)
        : numerator_(numerator), denominator_(denominator) {
        check(denominator > 0 && numerator >= 0 && numerator <= denominator, numerator, " / ",
              denominator, " is not a share from 0 to 1");
    }

    // x > ratio * whole
    bool exceeded_by(std::int64_t x, std::int64_t whole) const {
        return Wide{x} * denominator_ > Wide{whole} * numerator_;
    }
    // x <= ceil(ratio * whole)
    bool rounded_up_holds(std::int64_t x, std::int64_t whole) const {
        return x <= 0 || Wide{x - 1} * denominator_ < Wide{whole} * numerator_;
    }
    // floor(ratio * whole)
    std::int64_t floor_of(std::int64_t whole) const {
        return static_cast<std::int64_t>(Wide{whole} * numerator_ / denominator_);
    }

  private:
    std::int64_t numerator_ = 0, denominator_ = 1;
};

}  // namespace megapack
