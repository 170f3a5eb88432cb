// What every strategy is told besides its own rules, and the limits of what it may be asked for.
#pragma once

#include <cstdint>
#include <vector>

#include "core/base/check.hpp"
#include "core/base/parallel.hpp"
#include "core/base/span.hpp"

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

// Documents a task handles between two reports of progress. The tests of the core take few, so that
// small inputs have many parts.
#ifndef MEGAPACK_PART_SIZE
#define MEGAPACK_PART_SIZE (std::int64_t{1} << 20)
#endif
constexpr std::int64_t kPartSize = MEGAPACK_PART_SIZE;

constexpr std::int64_t num_parts(std::int64_t size) {
    return (size + kPartSize - 1) / kPartSize;
}

// visit(part, its range) for all documents in parts, in parallel, with progress.
template <typename Visit>
void for_each_part(const Run& run, std::int64_t size, Visit visit) {
    for_each_part(run.threads, size, num_parts(size), [&](std::int64_t p, Part range) {
        visit(p, range);
        run.progress.advance(range.size());
    });
}

inline void check_capacity(std::int64_t capacity) {
    check(capacity >= 1 && capacity <= kMaxCapacity, "a capacity is ", capacity,
          " tokens; it must be from 1 to ", kMaxCapacity);
}

// How far bins may exceed the capacity.
inline void check_extra_capacity(std::int64_t extra_capacity) {
    check(extra_capacity >= 0 && extra_capacity <= kMaxCapacity, "extra_capacity is ",
          extra_capacity, " tokens; it must be from 0 to ", kMaxCapacity);
}

inline void check_capacities(const std::vector<std::int64_t>& capacities) {
    check(!capacities.empty(), "there are no buckets; give at least one capacity in tokens");
    for (std::int64_t b = 0; b < ssize(capacities); ++b) {
        check_capacity(capacities[b]);
        check(b == 0 || capacities[b - 1] < capacities[b], "buckets must ascend; ", capacities[b],
              " follows ", capacities[b == 0 ? 0 : b - 1]);
    }
}

}  // namespace megapack
