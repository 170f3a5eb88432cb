// Independent tasks on a few threads, and how far they have come. Results never depend on the
// number of threads: a task writes only what is its own.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

namespace megapack {

// [begin, end) of things that are counted.
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

// Counts work done by all threads; only the thread that made it calls `report`, so that a report
// may take a lock (Python's) which the others never need. A report may throw to stop the work.
class Progress {
  public:
    using Report = std::function<void(std::int64_t done, std::int64_t total)>;

    explicit Progress(Report report = nullptr) : report_(std::move(report)) {}

    void add_total(std::int64_t amount) { total_ += amount; }
    void advance(std::int64_t amount) {
        const std::int64_t done = done_.fetch_add(amount) + amount;
        if (report_ && done < total_ && std::this_thread::get_id() == owner_) report_(done, total_);
    }
    // All is done; this is always reported.
    void finish() {
        if (report_) report_(total_, total_);
    }

  private:
    Report report_;
    std::thread::id owner_ = std::this_thread::get_id();
    std::int64_t total_ = 0;
    std::atomic<std::int64_t> done_{0};
};

// task(i) for every i in [0, count), each once, on the calling thread and up to `threads - 1`
// others. The first exception stops the tasks not yet begun and is thrown here.
void parallel_for(int threads, std::int64_t count, const std::function<void(std::int64_t)>& task);

// visit(part, its range) for `size` things in `count` parts, in parallel.
template <typename Visit>
void for_each_part(int threads, std::int64_t size, std::int64_t count, Visit visit) {
    parallel_for(threads, count, [&](std::int64_t p) { visit(p, part_of(size, count, p)); });
}

// table[part][column], a count, becomes where it begins when everything lies column after column
// and in a column part after part. Returns where the columns begin and, last, where all ends.
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

// The same for one column: counts[part] becomes where the part begins; returns where all ends.
inline std::int64_t lay_out(std::vector<std::int64_t>& counts) {
    std::int64_t position = 0;
    for (std::int64_t& count : counts) position += std::exchange(count, position);
    return position;
}

}  // namespace megapack
