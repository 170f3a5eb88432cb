// What every strategy is told besides its own rules, and the limits of what it may be asked for.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/check.hpp"
#include "core/base/parallel.hpp"

namespace megapack {

// A histogram of so many lengths is kept for every thread or pool in work.
constexpr std::int64_t kMaxCapacity = std::int64_t{1} << 24;
constexpr int kMaxThreads = 1024;

inline int checked_threads(std::int64_t threads) {
    check(threads >= 1 && threads <= kMaxThreads, "threads is ", threads, "; it must be from 1 to ",
          kMaxThreads);
    return static_cast<int>(threads);
}

// The result is a function of everything but threads.
struct Run {
    Run(std::uint64_t seed_, std::int64_t threads_, Progress& progress_)
        : seed(seed_), threads(checked_threads(threads_)), progress(progress_) {}

    std::uint64_t seed;
    int threads;
    Progress& progress;
};

inline void check_capacity(std::int64_t capacity) {
    check(capacity >= 1 && capacity <= kMaxCapacity, "a capacity is ", capacity,
          " tokens; it must be from 1 to ", kMaxCapacity);
}

inline void check_capacities(const std::vector<std::int64_t>& capacities) {
    check(!capacities.empty(), "there are no buckets; give at least one capacity in tokens");
    for (std::size_t b = 0; b < capacities.size(); ++b) {
        check_capacity(capacities[b]);
        check(b == 0 || capacities[b - 1] < capacities[b], "buckets must ascend; ", capacities[b],
              " follows ", capacities[b == 0 ? 0 : b - 1]);
    }
}

}  // namespace megapack
