#include "core/base/parallel.hpp"

#include <exception>
#include <mutex>
#include <vector>

namespace megapack {

void parallel_for(int threads, std::size_t count, const std::function<void(std::size_t)>& task) {
    std::atomic<std::size_t> next{0};
    std::exception_ptr failure;
    std::mutex failure_mutex;
    const auto work = [&] {
        for (std::size_t i = next++; i < count; i = next++) {
            try {
                task(i);
            } catch (...) {
                const std::lock_guard<std::mutex> lock(failure_mutex);
                if (!failure) failure = std::current_exception();
                next = count;
            }
        }
    };
    const std::size_t helpers = std::min(count, static_cast<std::size_t>(std::max(threads, 1)));
    std::vector<std::thread> others;
    others.reserve(helpers);  // growing with threads in it could fail, and a thread must be joined
    try {
        for (std::size_t t = 1; t < helpers; ++t) others.emplace_back(work);
    } catch (...) {
        // No more threads, or no memory for one: those there are do all the work.
    }
    work();
    for (std::thread& thread : others) thread.join();
    if (failure) std::rethrow_exception(failure);
}

}  // namespace megapack
