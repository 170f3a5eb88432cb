// [begin, end) of things that are counted.
#pragma once

#include <algorithm>
#include <cstdint>

namespace megapack {

struct Part {
    std::int64_t begin, end;

    std::int64_t size() const { return end - begin; }
};

// Part i when `size` things are cut in `count` parts that differ by at most one.
inline Part part_of(std::int64_t size, std::int64_t count, std::int64_t i) {
    const std::int64_t small = size / count, larger = size % count;
    const std::int64_t begin = i * small + std::min(i, larger);
    return {begin, begin + small + (i < larger ? 1 : 0)};
}

}  // namespace megapack
