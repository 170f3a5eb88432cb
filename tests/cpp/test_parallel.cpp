// Threads: every task runs once, the caller gets the first exception, and the process survives a
// lack of memory or threads. Also messages of errors, and spans.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <vector>

#include "core/base/parallel.hpp"
#include "core/base/span.hpp"
#include "require.hpp"

namespace {

// Allocations of this thread until one fails; below 0: none fails.
thread_local int allocations_left = -1;

}  // namespace

void* operator new(std::size_t size) {
    if (allocations_left == 0) throw std::bad_alloc();
    if (allocations_left > 0) --allocations_left;
    if (void* memory = std::malloc(size)) return memory;
    throw std::bad_alloc();
}
void operator delete(void* memory) noexcept {
    std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
    std::free(memory);
}

namespace {

constexpr std::int64_t kTasks = 1000;

void test_every_task_runs_once() {
    for (const int threads : {-1, 0, 1, 2, 7}) {
        std::vector<std::atomic<int>> done(kTasks);
        megapack::parallel_for(threads, kTasks, [&](std::int64_t i) { ++done[i]; });
        for (const auto& count : done) require(count == 1, "a task did not run exactly once");
    }
    megapack::parallel_for(
        4, 0, [](std::int64_t) { require(false, "a task ran although there are none"); });
}

void test_exception_in_a_task() {
    for (const int threads : {1, 4}) {
        const auto fails_at_five = [](std::int64_t i) {
            if (i == 5) throw std::runtime_error("five");
        };
        const auto run = [&] { megapack::parallel_for(threads, 100, fails_at_five); };
        require(message_of<std::runtime_error>(run) == "five", "the exception of the task");
    }
}

// If memory runs out at any point of the start of threads, all tasks run or bad_alloc is thrown.
void test_no_memory_for_threads() {
    int thrown = 0, finished = 0;
    for (int allowed = 0; allowed < 30; ++allowed) {
        std::atomic<std::int64_t> done{0};
        const std::function<void(std::int64_t)> task = [&](std::int64_t) { ++done; };
        allocations_left = allowed;
        bool failed = false;
        try {
            megapack::parallel_for(9, kTasks, task);
        } catch (const std::bad_alloc&) {
            failed = true;
        }
        allocations_left = -1;
        require(failed || done == kTasks, "tasks were skipped without an error");
        (failed ? thrown : finished) += 1;
    }
    require(thrown > 0 && finished > 0, "memory ran out too late or too early to show anything");
}

void test_parts_tile_the_whole() {
    for (const std::int64_t size : {0, 1, 6, 7, 8, 1000}) {
        std::int64_t end = 0;
        for (std::int64_t i = 0; i < 7; ++i) {
            const megapack::Part part = megapack::part_of(size, 7, i);
            require(part.begin == end && part.size() <= size / 7 + 1, "parts");
            end = part.end;
        }
        require(end == size, "parts leave something out");
    }
}

void test_messages_and_spans() {
    const auto message =
        message_of([] { megapack::check(false, "sample ", 3, " has ", 8, " tokens"); });
    require(message == "sample 3 has 8 tokens", message);
    std::vector<int> values{1, 2, 3};
    megapack::Span<const int> span(values);
    require(span.size() == 3 && span.subspan(1, 2)[1] == 3, "a span");
}

}  // namespace

int main() {
    test_messages_and_spans();
    test_every_task_runs_once();
    test_exception_in_a_task();
    test_no_memory_for_threads();
    test_parts_tile_the_whole();
    std::puts("ok");
    return 0;
}
