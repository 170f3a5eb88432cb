// Independent tasks on a few threads, and progress reports. Results never depend on the number of
// threads: no two tasks write the same memory.
//
//     for_each_part(threads, 10, 3, visit)
//         ->  visit(0, {0, 4}), visit(1, {4, 7}), visit(2, {7, 10})
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

namespace megapack {

// A half-open range [begin, end).
struct Part {
    std::int64_t begin, end;

    std::int64_t size() const { return end - begin; }
};

// Returns part i of [0, size) cut into `count` parts whose sizes differ by at most one.
inline Part part_of(std::int64_t size, std::int64_t count, std::int64_t i) {
    const std::int64_t small = size / count, larger = size % count;
    const std::int64_t begin = i * small + std::min(i, larger);
    return {begin, begin + small + (i < larger ? 1 : 0)};
}

// Counts the work done by all threads. Only the thread that constructed it calls `report`, so a
// report may take the GIL. A report may throw to stop the work.
class Progress {
  public:
    using Report = std::function<void(std::int64_t done, std::int64_t total)>;

    explicit Progress(Report report = nullptr) : report_(std::move(report)) {}

    void add_total(std::int64_t amount) { total_ += amount; }
    void advance(std::int64_t amount) {
        const std::int64_t done = done_.fetch_add(amount) + amount;
        if (report_ && done < total_ && std::this_thread::get_id() == owner_) report_(done, total_);
    }
    // Reports completion, in any case.
    void finish() {
        if (report_) report_(total_, total_);
    }

  private:
    Report report_;
    std::thread::id owner_ = std::this_thread::get_id();
    std::int64_t total_ = 0;
    std::atomic<std::int64_t> done_{0};
};

// Calls task(i) once for every i in [0, count), on the calling thread and up to `threads - 1`
// others. After an exception no further task starts; the first exception is rethrown here.
void parallel_for(int threads, std::int64_t count, const std::function<void(std::int64_t)>& task);

// Cuts [0, size) into `count` parts and calls visit(number of the part, its range) in parallel.
template <typename Visit>
void for_each_part(int threads, std::int64_t size, std::int64_t count, Visit visit) {
    parallel_for(threads, count, [&](std::int64_t p) { visit(p, part_of(size, count, p)); });
}

// Replaces each count table[part][column] by its offset in an array ordered by column, then part.
// Returns the offsets of the columns and, last, the total.
template <typename T>
std::vector<std::int64_t> lay_out(std::vector<std::vector<T>>& table, std::int64_t columns) {
    std::vector<std::int64_t> begins;
    begins.reserve(columns + 1);
    std::int64_t position = 0;
    for (std::int64_t c = 0; c < columns; ++c) {
        begins.push_back(position);
        for (auto& part : table) position += std::exchange(part[c], static_cast<T>(position));
    }
    begins.push_back(position);
    return begins;
}

// Replaces each count by the sum of the counts before it; returns the total.
inline std::int64_t lay_out(std::vector<std::int64_t>& counts) {
    std::int64_t position = 0;
    for (std::int64_t& count : counts) position += std::exchange(count, position);
    return position;
}

}  // namespace megapack
