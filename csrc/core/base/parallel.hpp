// Independent tasks on a few threads, and how far they have come. Results never depend on the
// number of threads: a task writes only what is its own.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <thread>
#include <utility>

namespace megapack {

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
void parallel_for(int threads, std::size_t count, const std::function<void(std::size_t)>& task);

// Documents a task handles between two reports of progress. The tests of the core take few, so that
// small inputs have many parts.
#ifndef MEGAPACK_PART_SIZE
#define MEGAPACK_PART_SIZE (std::size_t{1} << 20)
#endif
constexpr std::size_t kPartSize = MEGAPACK_PART_SIZE;

// [begin, end) of part i when `size` things are cut in `count` parts that differ by at most one.
struct Part {
    std::size_t begin, end;
};
inline Part part_of(std::size_t size, std::size_t count, std::size_t i) {
    const std::size_t small = size / count, larger = size % count;
    const std::size_t begin = i * small + std::min(i, larger);
    return {begin, begin + small + (i < larger ? 1 : 0)};
}

}  // namespace megapack
